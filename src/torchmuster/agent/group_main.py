"""The process of a group's head, and those of its tasks' agents on this machine.

python -I -S group_main.py --run-dir DIR --group NAME --listen-fd N --lifeline-fd N
python -I -S group_main.py --run-dir DIR --group NAME --task NAME --attempt K --head HOST:PORT --lifeline-fd N
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from typing import Any

if __package__ in (None, ""):
    _package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(_package))

from torchmuster import proc
from torchmuster.agent.container import remove_containers
from torchmuster.agent.group_head import GroupHead, HeadOptions, port_candidates
from torchmuster.agent.network import PrivateNetwork
from torchmuster.agent.task_agent import NetworkShare, TaskAgent, TaskOptions
from torchmuster.agent.voice import LogVoice
from torchmuster.agent.worker_socket import make_socket_folder
from torchmuster.errors import MusterError, RunDirectoryError
from torchmuster.files import atomic
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.text import render_report, report_of_error
from torchmuster.model.workflow import TaskNetwork as Sharing
from torchmuster.model.workflow import WorkflowPlan
from torchmuster.net.listener import Listener
from torchmuster.net.secret import read_secret

_FLUSH_S = 5.0


class LocalStarter:
    """Starts the agents of tasks as processes of this machine."""

    def __init__(
        self, run_dir: RunDir, group: str, head: tuple[str, int], keep: frozenset[int]
    ) -> None:
        self.keep = keep  # children of ours that are no agents
        self._run_dir = run_dir
        self._group = group
        self._head = head
        self._children: list[tuple[str, int, proc.Child]] = []
        self._lifeline = os.pipe2(os.O_CLOEXEC)

    @property
    def has_agents(self) -> bool:
        """Say whether an agent still runs."""
        return bool(self._children)

    def start(self, task: str, attempt: int) -> None:
        """Start an agent."""
        argv = [sys.executable, "-I", "-S", os.path.abspath(__file__)]
        argv += [f"--run-dir={self._run_dir.path}", f"--group={self._group}", f"--task={task}"]
        argv += [f"--attempt={attempt}", f"--head={self._head[0]}:{self._head[1]}"]
        argv += [f"--lifeline-fd={self._lifeline[0]}"]
        child = proc.start(argv, pass_fds=[self._lifeline[0]])
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
    options = parser.parse_args(arguments)
    proc.become_subreaper()
    try:
        conduct = _conduct_group(options) if options.task is None else _serve_task(options)
        return asyncio.run(conduct)
    except MusterError as error:
        sys.stderr.write(render_report(report_of_error(error)))
        return error.exit_code


def _read_plan(run_dir: RunDir) -> WorkflowPlan:
    try:
        return codec.from_plain(WorkflowPlan, atomic.read_json(run_dir.workflow))
    except codec.CodecError as error:
        raise RunDirectoryError(
            "the plan of the workflow can't be read", where=run_dir.workflow, why=str(error)
        ) from error


async def _conduct_group(options: argparse.Namespace) -> int:
    run_dir = RunDir(options.run_dir)
    plan = _read_plan(run_dir)
    start = atomic.read_json(run_dir.group(options.group).start) or {}
    listening = socket.socket(fileno=options.listen_fd)
    listening.setblocking(False)
    host, port = listening.getsockname()[:2]
    disk = DiskWriter()
    disk.start()
    network = _open_network(plan, run_dir, options.group)
    keep = frozenset([network.holder_pid]) if network is not None else frozenset()
    starter = LocalStarter(run_dir, options.group, (host, port), keep)
    head = GroupHead(
        HeadOptions(
            plan=plan,
            group=plan.group(options.group),
            run_dir=run_dir,
            first_attempts=start.get("first_attempts", {}),
            ran_s=float(start.get("ran_s", 0.0)),
            notes=(network.note,) if network is not None else (),
        ),
        starter,
        disk,
    )
    secret = read_secret(run_dir.secret)
    listener = Listener(listening, (secret, None), head.serve, head.refuse_stranger)
    serving = asyncio.create_task(listener.serve())
    conducting = asyncio.create_task(head.conduct())
    _end_with_lifeline(options.lifeline_fd, conducting)
    try:
        outcome = await conducting
        return outcome.exit_code
    except asyncio.CancelledError:
        return 7
    finally:
        serving.cancel()
        starter.cut_lifeline()
        await _end_agents(starter)
        remove_containers(plan.container, plan.run_id, options.group)
        if network is not None:
            network.close()
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


async def _end_agents(starter: LocalStarter) -> None:
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
    plan = _read_plan(run_dir)
    group = plan.group(options.group)
    start = atomic.read_json(run_dir.group(options.group).start) or {}
    host, _, port = options.head.rpartition(":")
    gpus = start.get("gpus", {}).get(options.task)
    disk = DiskWriter()
    disk.start()
    voice = LogVoice(run_dir.agent_log(options.task), disk)
    agent = TaskAgent(
        TaskOptions(
            plan=plan,
            group=group,
            task=group.task(options.task),
            attempt=options.attempt,
            run_dir=run_dir,
            head=(host, int(port)),
            secret=read_secret(run_dir.secret),
            gpus=None if gpus is None else tuple(gpus),
            network=_read_network(plan, run_dir, options.group, options.task),
            port_candidates=port_candidates(plan, group),
            socket_path=os.path.join(make_socket_folder(), "task.sock"),
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
