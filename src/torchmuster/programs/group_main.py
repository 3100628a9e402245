"""The process of a group's head, and those of its tasks' agents on this machine.

    group --run-dir DIR --group NAME --listen-fd N --lifeline-fd N
    group --run-dir DIR --group NAME --task NAME --attempt K --head HOST:PORT --lifeline-fd N

On hosts of ssh the head is here too, and each agent elsewhere has a proxy here (`node/remote/proxy.py`).
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torchmuster import proc
from torchmuster.errors import MusterError, RunDirectoryError
from torchmuster.files import atomic
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.head.group_head import GroupHead, GroupHeadOptions
from torchmuster.head.group_ports import port_candidates
from torchmuster.model import codec
from torchmuster.model.display.text import render_report, report_of_error
from torchmuster.model.workflow import GroupPlan, WorkflowPlan
from torchmuster.model.workflow import TaskNetwork as Sharing
from torchmuster.net.listener import Listener
from torchmuster.net.remote_messages import StartTask
from torchmuster.net.secret import read_secret
from torchmuster.node.environment import take_environment
from torchmuster.node.leftovers import make_socket_folder
from torchmuster.node.remote.proxy import proxy_argv
from torchmuster.node.sandbox.container import remove_containers
from torchmuster.node.sandbox.network import PrivateNetwork
from torchmuster.node.task.agent import TaskAgent
from torchmuster.node.task.options import NetworkShare, TaskOptions
from torchmuster.node.voice import LogVoice

_FLUSH_S = 5.0


Wrap = Callable[[str, list[str]], list[str] | None]


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
        argv = proc.node_program("group", f"--run-dir={self._run_dir.path}")
        argv += [f"--group={self._group}", f"--task={task}"]
        heads = ",".join(f"{host}:{port}" for host, port in self._heads)
        argv += [f"--attempt={attempt}", f"--head={heads}"]
        elsewhere = self._wrap(task, argv) if self._wrap is not None else None
        if (
            elsewhere is not None
        ):  # it ends when it misses the head: a lifeline does not reach there
            child = proc.start(elsewhere)
        else:
            lifeline = self._lifeline[0]
            child = proc.start([*argv, f"--lifeline-fd={lifeline}"], pass_fds=[lifeline])
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
    """Be the head of a group, or the agent of a task."""
    parser = argparse.ArgumentParser(prog="group")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--task")
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--head", default="")
    parser.add_argument("--listen-fd", type=int)
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--environment")
    parser.add_argument("--address")
    options = parser.parse_args(arguments)
    if options.environment is not None:
        take_environment(options.environment)
    proc.become_subreaper()
    try:
        conduct = _conduct_here(options) if options.task is None else _serve_task(options)
        return asyncio.run(conduct)
    except MusterError as error:
        sys.stderr.write(render_report(report_of_error(error)))
        return error.exit_code


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


async def _conduct_here(options: argparse.Namespace) -> int:
    """Be the head of a group whose tasks are all on this machine."""
    run_dir = RunDir(options.run_dir)
    plan = read_plan(run_dir)
    listening = socket.socket(fileno=options.listen_fd)
    listening.setblocking(False)
    host, port = listening.getsockname()[:2]
    network = _open_network(plan, run_dir, options.group)
    keep = frozenset([network.holder_pid]) if network is not None else frozenset()
    start = atomic.read_json(run_dir.group(options.group).start) or {}
    wrap = (
        _wrap_elsewhere(run_dir, plan.group(options.group), start, port)
        if start.get("broker")
        else None
    )
    starter = ProcessStarter(run_dir, options.group, [(host, port)], keep, wrap)
    notes = (network.note,) if network is not None else ()
    try:
        return await conduct_group(
            plan, run_dir, options.group, listening, starter, options.lifeline_fd, notes=notes
        )
    finally:
        remove_containers(plan.container, plan.run_id, options.group)
        if network is not None:
            network.close()


def _wrap_elsewhere(run_dir: RunDir, group: GroupPlan, start: dict[str, Any], port: int) -> Wrap:
    """Return how the proxies of agents on hosts that the client reaches are started; tell training tasks their hosts."""
    hosts = start["hosts"]
    said = {"engine": "ssh", "tasks": hosts, "gpus": start.get("host_gpus", {})}
    atomic.write_json(run_dir.group(group.name).nodes, said)

    def wrap(task: str, argv: list[str]) -> list[str]:
        attempt = next(word.partition("=")[2] for word in argv if word.startswith("--attempt="))
        asked = group.task(task)
        request = StartTask(
            host=hosts[task][0],
            group=group.name,
            task=task,
            attempt=int(attempt),
            port=port,
            # GPUs and the other nodes of a training task were given to it on its own hosts.
            may_move=asked.training is None and not asked.resources.gpu,
        )
        return proxy_argv(start["broker"], request)

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
) -> int:
    """Conduct a group to its end and return its exit code; SIGTERM stops it when it `obeys_signals`."""
    start = atomic.read_json(run_dir.group(group).start) or {}
    disk = DiskWriter(root=run_dir.path)
    disk.start()
    options = GroupHeadOptions(
        plan=plan,
        group=plan.group(group),
        run_dir=run_dir,
        first_attempts=start.get("first_attempts", {}),
        ran_s=float(start.get("ran_s", 0.0)),
        notes=notes,
    )
    head = GroupHead(options, starter, disk)
    secret = read_secret(run_dir.secret)
    listener = Listener(listening, (secret, None), head.serve, head.refuse_stranger)
    serving = asyncio.create_task(listener.serve())
    conducting = asyncio.create_task(head.conduct())
    _end_with_lifeline(lifeline_fd, conducting)
    if obeys_signals:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, head.request_stop, "the scheduler")
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


def _end_with_lifeline(fd: int | None, task: "asyncio.Task[Any]") -> None:
    if fd is None:
        return
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(fd)
        task.cancel()

    loop.add_reader(fd, end)


async def _serve_task(options: argparse.Namespace) -> int:
    run_dir = RunDir(options.run_dir)
    plan = read_plan(run_dir)
    group = plan.group(options.group)
    start = atomic.read_json(run_dir.group(options.group).start) or {}
    heads = [word.rpartition(":") for word in options.head.split(",")]
    gpus = start.get("gpus", {}).get(options.task)
    disk = DiskWriter(root=run_dir.path)
    disk.start()
    voice = LogVoice(run_dir.agent_log(options.task), disk)
    agent = TaskAgent(
        TaskOptions(
            plan=plan,
            group=group,
            task=group.task(options.task),
            attempt=options.attempt,
            run_dir=run_dir,
            heads=tuple((host, int(port)) for host, _, port in heads),
            secret=read_secret(run_dir.secret),
            gpus=None if gpus is None else tuple(gpus),
            network=_read_network(plan, run_dir, options.group, options.task),
            port_candidates=port_candidates(plan, group),
            socket_path=os.path.join(make_socket_folder(), "task.sock"),
            address=options.address,
        ),
        disk,
        voice,
    )
    running = asyncio.create_task(agent.run())
    _end_with_lifeline(options.lifeline_fd, running)
    try:
        return await running
    except asyncio.CancelledError:
        return 7
    finally:
        disk.flush(_FLUSH_S)


def _read_network(
    plan: WorkflowPlan, run_dir: RunDir, group: str, task: str
) -> NetworkShare | None:
    if plan.network is not Sharing.PRIVATE:
        return None
    part = atomic.read_json(run_dir.group(group).network)[task]
    hosts = part.pop("hosts").encode("utf-8", "surrogateescape")
    resolver = part.pop("resolver")
    return NetworkShare(
        hosts=hosts, resolver=None if resolver is None else resolver.encode(), **part
    )
