"""The process of a group's head: `group`, told by a `GroupOrder`. It starts its tasks' agents on this machine.

On hosts of ssh the head is here too, and each agent elsewhere has a proxy here (`launcher/node/remote/proxy.py`).
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.codec import from_words, to_words
from torchmuster.core.net.address import read_secret
from torchmuster.core.net.listener import Listener
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.net.remote_messages import StartTask
from torchmuster.launcher.node.remote.proxy import proxy_argv
from torchmuster.workflow.head.group_head import GroupHead, GroupHeadOptions
from torchmuster.workflow.plan import GroupNodes, GroupPlan, GroupStart, WorkflowPlan
from torchmuster.workflow.plan import TaskNetwork as Sharing
from torchmuster.workflow.sandbox.container import remove_containers
from torchmuster.workflow.sandbox.network import PrivateNetwork
from torchmuster.workflow.sandbox.place import clear_places
from torchmuster.workflow.task.options import GroupOrder, TaskOrder

_FLUSH_S = 5.0


Wrap = Callable[[TaskOrder], list[str] | None]


def task_argv(order: TaskOrder) -> list[str]:
    """Return the command of a task's agent."""
    return proc.node_program("task", *to_words(order))


class ProcessStarter:
    """Starts the agents of tasks as processes of ours: here, or by a command that brings them to another node.

    Args:
        heads: Where the head of the group listens: addresses that agents try in turn.
        keep: Children of ours that are no agents.
        wrap: Returns the command that starts a task's agent elsewhere; None when it belongs here.
    """

    def __init__(
        self,
        run_dir: RunDir,
        group: str,
        heads: Sequence[tuple[str, int]],
        keep: frozenset[int] = frozenset(),
        wrap: Wrap | None = None,
    ) -> None:
        self.keep = keep
        self._run_dir = run_dir
        self._group = group
        self._heads = heads
        self._wrap = wrap
        self._children: list[tuple[str, int, proc.Child]] = []
        self._lifeline = os.pipe2(os.O_CLOEXEC)

    @property
    def has_agents(self) -> bool:
        """Say whether an agent still runs."""
        return bool(self._children)

    def start(self, task: str, attempt: int) -> None:
        """Start an agent."""
        order = TaskOrder(
            run_dir=self._run_dir.path,
            group=self._group,
            task=task,
            attempt=attempt,
            head=tuple(f"{host}:{port}" for host, port in self._heads),
        )
        elsewhere = self._wrap(order) if self._wrap is not None else None
        # One elsewhere ends when it misses the head: a lifeline does not reach there.
        if elsewhere is not None:
            child = proc.start(elsewhere)
        else:
            lifeline = self._lifeline[0]
            child = proc.start(task_argv(replace(order, lifeline_fd=lifeline)), pass_fds=[lifeline])
        self._children.append((task, attempt, child))

    def poll(self) -> list[tuple[str, int, str]]:
        """Return the agents that have ended, after what they left has been ended."""
        ended: list[tuple[str, int, str]] = []
        for entry in list(self._children):
            status = entry[2].poll()
            if status is not None:
                self._children.remove(entry)
                how = f"signal {-status}" if status < 0 else f"exit code {status}"
                ended.append((entry[0], entry[1], how))
        proc.end_children(self.keep.union(child.pid for _, _, child in self._children))
        return ended

    def kill(self, task: str) -> None:
        """SIGKILL a task's agents; `poll` reaps them and what they started."""
        for name, _, child in self._children:
            if name == task:
                child.send_signal(signal.SIGKILL)

    def cut_lifeline(self) -> None:
        """Let the agents end themselves."""
        for fd in self._lifeline:
            os.close(fd)


def main(arguments: list[str]) -> int:
    """Be the head of a group."""
    proc.become_subreaper()
    return asyncio.run(_conduct_here(from_words(GroupOrder, arguments)))


def read_plan(run_dir: RunDir) -> WorkflowPlan:
    """Return the plan of a workflow.

    Raises:
        RunDirectoryError: It can't be read.
    """
    try:
        return codec.from_plain(WorkflowPlan, atomic.read_json(run_dir.workflow))
    except codec.CodecError as error:
        raise RunDirectoryError(
            "the plan of the workflow can't be read", where=run_dir.workflow, why=str(error)
        ) from error


async def _conduct_here(order: GroupOrder) -> int:
    """Be the head of a group whose tasks are all on this machine."""
    run_dir = RunDir(order.run_dir)
    plan = read_plan(run_dir)
    listening = socket.socket(fileno=order.listen_fd)
    listening.setblocking(False)
    host, port = listening.getsockname()[:2]
    network = _open_network(plan, run_dir, order.group)
    keep = frozenset([network.holder_pid]) if network is not None else frozenset()
    start = read_start(run_dir, order.group)
    wrap = None
    if start.broker is not None and start.nodes is not None:
        # Training tasks look there for their hosts.
        atomic.write_json(run_dir.group(order.group).nodes, codec.to_plain(start.nodes))
        wrap = _wrap_elsewhere(plan.group(order.group), start.broker, start.nodes, port)
    starter = ProcessStarter(run_dir, order.group, [(host, port)], keep, wrap)
    notes = (network.note,) if network is not None else ()
    try:
        return await conduct_group(
            plan, run_dir, order.group, listening, starter, order.lifeline_fd, notes=notes
        )
    finally:
        remove_containers(plan.container, plan.run_id, order.group)
        if network is not None:
            network.close()


def read_start(run_dir: RunDir, group: str) -> GroupStart:
    """Return what the client tells; nothing where a job conducts the group."""
    return codec.from_plain(GroupStart, atomic.read_json(run_dir.group(group).start) or {})


def _wrap_elsewhere(group: GroupPlan, broker: str, nodes: GroupNodes, port: int) -> Wrap:
    """Return how the proxies of agents on hosts that the client reaches are started."""

    def wrap(order: TaskOrder) -> list[str]:
        asked = group.task(order.task)
        request = StartTask(
            host=nodes.tasks[order.task][0].name,
            group=group.name,
            task=order.task,
            attempt=order.attempt,
            port=port,
            # GPUs and the other nodes of a training task were given to it on its own hosts.
            may_move=asked.training is None and not asked.resources.gpu,
        )
        return proxy_argv(broker, request)

    return wrap


async def conduct_group(
    plan: WorkflowPlan,
    run_dir: RunDir,
    group: str,
    listening: socket.socket,
    starter: ProcessStarter,
    lifeline_fd: int | None = None,
    *,
    notes: tuple[str, ...] = (),
    obeys_signals: bool = False,
    stopped_by: Callable[[], str] = lambda: "the scheduler",
) -> int:
    """Conduct a group to its end and return its exit code; SIGTERM stops it when it `obeys_signals`."""
    start = read_start(run_dir, group)
    disk = DiskWriter(root=run_dir.path)
    disk.start()
    options = GroupHeadOptions(
        plan=plan,
        group=plan.group(group),
        run_dir=run_dir,
        first_attempts=start.first_attempts,
        ran_s=start.ran_s,
        notes=notes,
    )
    head = GroupHead(options, starter, disk)
    secret = read_secret(run_dir.secret)
    listener = Listener(listening, (secret, None), head.serve, head.refuse_stranger)
    serving = asyncio.create_task(listener.serve())
    conducting = asyncio.create_task(head.conduct())
    end_with_lifeline(lifeline_fd, conducting)
    if obeys_signals:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, lambda: head.request_stop(stopped_by()))
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(signum, head.forward, int(signum))
    try:
        outcome = await conducting
        return outcome.exit_code
    except asyncio.CancelledError:
        return 7
    finally:
        serving.cancel()
        starter.cut_lifeline()
        await _end_agents(starter)
        for task in options.group.tasks:
            clear_places(run_dir.task_folder(task.name))
        disk.flush(_FLUSH_S)


def _open_network(plan: WorkflowPlan, run_dir: RunDir, group: str) -> PrivateNetwork | None:
    """Make the private network of a group, and tell its agents about their parts."""
    if plan.network is not Sharing.PRIVATE:
        return None
    network = PrivateNetwork.open([task.name for task in plan.group(group).tasks])
    resolver = network.resolver_file()
    parts = {
        name: {
            "resolver": None if resolver is None else resolver.decode(),
            "name": name,
            "address": part.address,
            "hosts": network.hosts_file(name).decode("utf-8", "surrogateescape"),
            "join": dict(part.join),
            "environment": dict(part.environment),
        }
        for name, part in network.tasks.items()
    }
    atomic.write_json(run_dir.group(group).network, parts, mode=0o600)
    return network


async def _end_agents(starter: ProcessStarter) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 5.0
    while starter.has_agents and loop.time() < deadline:
        starter.poll()
        await asyncio.sleep(0.01)
    while proc.end_children(starter.keep) and loop.time() < deadline + 5.0:
        await asyncio.sleep(0.01)


def end_with_lifeline(fd: int | None, task: "asyncio.Task[Any]") -> None:
    """Cancel a task at the end of file of a lifeline."""
    if fd is None:
        return
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(fd)
        task.cancel()

    loop.add_reader(fd, end)
