"""The program `group`, the head of a group: it starts the agents of the group's tasks.

When tasks run on ssh hosts, the head still runs here, and starts a proxy for each remote agent
(`launcher/node/remote/proxy.py`).
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
from torchmuster.core.model.codec import from_arguments, to_arguments
from torchmuster.core.net.address import read_secret
from torchmuster.core.net.listener import Listener
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.net.remote_messages import StartTask
from torchmuster.launcher.node.remote.proxy import proxy_argv
from torchmuster.workflow.head.group_head import GroupHead, GroupHeadOptions
from torchmuster.workflow.plan import GroupInput, GroupNodes, GroupPlan, WorkflowPlan
from torchmuster.workflow.plan import TaskNetwork as Sharing
from torchmuster.workflow.sandbox.container import remove_containers
from torchmuster.workflow.sandbox.network import PrivateNetwork
from torchmuster.workflow.sandbox.place import clear_views
from torchmuster.workflow.task.setup import GroupOrder, TaskOrder

_FLUSH_S = 5.0


Wrap = Callable[[TaskOrder], list[str] | None]


def task_argv(order: TaskOrder) -> list[str]:
    """Return the command line of a task's agent."""
    return proc.node_program("task", *to_arguments(order))


class ProcessStarter:
    """Starts the agents of tasks as child processes, which run here or bring the agent elsewhere.

    Args:
        heads: Addresses of the group's head, which agents try in turn.
        keep: Pids of child processes that are not agents, and that `poll` must not end.
        wrap: Returns the command that starts a task's agent elsewhere; None to start it here.
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
        """Return whether an agent still runs."""
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
        # A remote agent ends when it loses the head: a lifeline does not reach that far.
        if elsewhere is not None:
            child = proc.start(elsewhere)
        else:
            lifeline = self._lifeline[0]
            child = proc.start(task_argv(replace(order, lifeline_fd=lifeline)), pass_fds=[lifeline])
        self._children.append((task, attempt, child))

    def poll(self) -> list[tuple[str, int, str]]:
        """Return the agents that have ended, and end the processes that they left."""
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
        """SIGKILL a task's agents; `poll` reaps them and the processes that they started."""
        for name, _, child in self._children:
            if name == task:
                child.send_signal(signal.SIGKILL)

    def cut_lifeline(self) -> None:
        """Close the lifeline, so that the agents end themselves."""
        for fd in self._lifeline:
            os.close(fd)


def main(arguments: list[str]) -> int:
    """Run the head of a group; return the group's exit code."""
    proc.become_subreaper()
    return asyncio.run(_run_head(from_arguments(GroupOrder, arguments)))


def read_plan(run_dir: RunDir) -> WorkflowPlan:
    """Read the plan of a workflow.

    Raises:
        RunDirectoryError: The plan can't be read.
    """
    try:
        return codec.from_plain(WorkflowPlan, atomic.read_json(run_dir.workflow))
    except codec.CodecError as error:
        raise RunDirectoryError(
            "the plan of the workflow can't be read", where=run_dir.workflow, why=str(error)
        ) from error


async def _run_head(order: GroupOrder) -> int:
    """Conduct a group whose head the owner started on this machine."""
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
        # Training tasks read their hosts from this file.
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


def read_start(run_dir: RunDir, group: str) -> GroupInput:
    """Read the owner's `GroupInput`; return an empty one when a job conducts the group."""
    return codec.from_plain(GroupInput, atomic.read_json(run_dir.group(group).start) or {})


def _wrap_elsewhere(group: GroupPlan, broker: str, nodes: GroupNodes, port: int) -> Wrap:
    """Return the function that gives the command of the proxy for an agent on an ssh host."""

    def wrap(order: TaskOrder) -> list[str]:
        asked = group.task(order.task)
        request = StartTask(
            host=nodes.tasks[order.task][0].name,
            group=group.name,
            task=order.task,
            attempt=order.attempt,
            port=port,
            # A training task's nodes, and a task's GPUs, are those of particular hosts.
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
    """Conduct a group to its end; return its exit code. With `obeys_signals`, SIGTERM stops it."""
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
            clear_views(run_dir.task_folder(task.name))
        disk.flush(_FLUSH_S)


def _open_network(plan: WorkflowPlan, run_dir: RunDir, group: str) -> PrivateNetwork | None:
    """Make the private network of a group, and write each task's part of it for the agents."""
    if plan.network is not Sharing.PRIVATE:
        return None
    network = PrivateNetwork.open([task.name for task in plan.group(group).tasks])
    resolver = network.resolver_file()
    parts = {
        name: replace(part, hosts=network.hosts_file(name), resolver=resolver)
        for name, part in network.tasks.items()
    }
    atomic.write_json(run_dir.group(group).network, codec.to_plain(parts), mode=0o600)
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
    """Cancel an asyncio task when the lifeline reaches its end of file."""
    if fd is None:
        return
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(fd)
        task.cancel()

    loop.add_reader(fd, end)
