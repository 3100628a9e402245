"""One agent process from its first line to its last.

The spawner is started before anything else is imported: its `import torch` takes a second, in which the
agent gets ready and finds the others.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files.claims import Claims
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir, size_of, trained_last
from torchmuster.head.options import Office, TrainingHeadOptions
from torchmuster.model import codec, contract
from torchmuster.model.codec import from_words
from torchmuster.model.display.lines import Terminal
from torchmuster.model.message import moment_of
from torchmuster.model.plan import Program, RunPlan
from torchmuster.net.address import split_endpoint
from torchmuster.net.handshake import read_secret
from torchmuster.node.door.call import HasStatus
from torchmuster.node.launcher_ranks import THREADS, share_threads, take_environment
from torchmuster.node.leftovers import make_socket_folder, sweep_beside
from torchmuster.node.options import AgentOptions, AgentOrder, HeadPlace
from torchmuster.node.spawner.start import begin_spawner, start_spawner

if TYPE_CHECKING:
    from torchmuster.node.agent import Agent
    from torchmuster.node.output import Voice
    from torchmuster.node.setup import NodeWork
    from torchmuster.programs.head_host import HeadHost
    from torchmuster.programs.successor import Successor


# What makes an agent: the command line that an owner or an engine has written, or `muster torchrun`.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLaunch:
    """One process with an agent, and with the head of its run in place 0.

    Attributes:
        head: None on other nodes; so is its socket, `listening`.
        lifeline_fd: Its end of file means that the owner of the run has gone.
        agent_log: Where the agent writes what it has to say; None for this terminal.
        notes: What to say first.
        error_file: Where the failure is told in torchrun's JSON.
    """

    agent: AgentOptions
    head: TrainingHeadOptions | None = None
    listening: socket.socket | None = None
    lifeline_fd: int | None = None
    agent_log: str | None = None
    notes: tuple[str, ...] = ()
    error_file: str | None = None


def read_launch(arguments: list[str]) -> AgentLaunch:
    """Return what the command line of an agent says, with the plan and the key of its run directory."""
    order = from_words(AgentOrder, arguments)
    if order.environment is not None:
        take_environment(order.environment)
    run_dir = RunDir(order.run_dir)
    plan = read_plan_file(run_dir.path)
    addresses = tuple(map(split_endpoint, order.head))
    name, num_workers = plan.node_name(order.place), plan.num_workers(order.place)
    listening = head = None
    if order.listen_fd is not None:
        listening = socket.socket(fileno=order.listen_fd)
        listening.setblocking(False)
        head = TrainingHeadOptions(
            plan=plan,
            run_dir=run_dir,
            own_address=addresses[0][0],
            first_attempt=order.first_attempt,
            restarts_spent=order.restarts_spent,
            why=f"after attempt {order.first_attempt - 1}" if order.first_attempt else "start",
            samples_bytes=size_of(run_dir.samples),
            has_owner=order.lifeline_fd is not None,
            office=_office(order, plan, run_dir),
            left_out=machines_left_out(run_dir) if order.first_attempt else frozenset(),
            expected=trained_last(plan, run_dir)
            if order.first_attempt and plan.spares
            else frozenset(),
            began_at=began_at(run_dir) if order.first_attempt else 0.0,
        )
    door = _door_program(plan.program, run_dir) if plan.is_session else None
    agent = AgentOptions(
        plan=plan if door is None else replace(plan, program=door),
        num_workers=num_workers,
        host=name,
        head=HeadPlace(
            addresses=addresses,
            secret=read_secret(run_dir.secret),
            join_timeout_s=plan.limits.join_timeout_s,
            file=run_dir.moved if head is None else None,
            heirs=run_dir.succession
            if head is None and Claims(run_dir.succession).has_heirs
            else None,
        ),
        environment={**job_environment(num_workers), **dict(plan.node_setup.environment)},
        run_dir=run_dir.path,
        place=order.place,
        is_head=head is not None,
        terminal=Terminal.from_word(order.terminal) if order.terminal is not None else None,
    )
    return AgentLaunch(
        agent=agent,
        head=head,
        listening=listening,
        lifeline_fd=order.lifeline_fd,
        agent_log=run_dir.agent_log(name),
    )


def _office(order: AgentOrder, plan: RunPlan, run_dir: RunDir) -> Office | None:
    """Return what the head shows for each attempt, where another node may take its place."""
    if order.term is None:
        return None
    return Office(
        claims=Claims(run_dir.succession),
        term=order.term,
        holder=order.holder,
        place=order.place,
        node=plan.node_name(order.place),
    )


def read_plan_file(path: str) -> RunPlan:
    """Return the plan of a run directory, as this node has it."""
    with open(RunDir(path).plan) as file:
        return codec.from_plain(RunPlan, json.load(file))


def _door_program(program: Program, run_dir: RunDir) -> Program:
    """Return the command of a session's door: each node has its own interpreter, torchmuster and run directory."""
    entry = os.path.join(os.path.dirname(proc.NODE_DOOR), "door.py")
    first, *flags = program.python
    return replace(program, target=first, args=(*flags, entry, run_dir.path))


def machines_left_out(run_dir: RunDir) -> frozenset[str]:
    """Return the machines that have computed wrongly in this run, by its record: also in an earlier job of it."""
    found: set[str] = set()
    try:
        with open(run_dir.events, errors="replace") as record:
            for line in record:
                if '"event":"node_left_out"' in line:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        found.add(str(json.loads(line)["machine"]))
    except OSError:  # then nothing is known
        return frozenset()
    return frozenset(found)


def began_at(run_dir: RunDir) -> float:
    """Return when the first head of a run began, by its record; 0 where that can't be read."""
    try:
        with open(run_dir.events, errors="replace") as record:
            starts = (line for line in record if '"event":"run_started"' in line)
            return moment_of(json.loads(next(starts, "{}")).get("time")) or 0.0
    except (OSError, ValueError):
        return 0.0


def job_environment(num_workers: int) -> dict[str, str]:
    """Return the environment for the job's interpreter: ours, and what torchrun adds to it."""
    environment = dict(os.environ)
    share_threads(environment, num_workers)
    return environment


_FLUSH_S = 5.0


def main(arguments: list[str]) -> None:
    """Run the agent that a client or an engine has asked for on the command line."""
    os._exit(run_agent(read_launch(arguments)))


def run_agent(launch: AgentLaunch, forked: tuple[HasStatus, socket.socket] | None = None) -> int:
    """Run an agent to its end and return its exit code.

    `forked` is a spawner that waits for its first packet, where a door has forked one.
    """
    options, plan = launch.agent, launch.agent.plan
    folder = make_socket_folder()
    socket_path = os.path.join(folder, "agent.sock")
    spawner: tuple[HasStatus, Any] | None = None
    if forked is not None:
        begin_spawner(forked[1], plan.program, socket_path)
        spawner = forked
    elif not plan.node_setup.lines:  # they may change the interpreter and its variables
        try:
            spawner = start_spawner(plan.program, options.environment, socket_path)
        except MusterError as error:
            if options.run_dir is None:
                shutil.rmtree(folder, ignore_errors=True)
                sys.stderr.write(_plain(error))
                return error.exit_code
            # The agent tries again, with what this node has.
    import asyncio  # after the spawner is on its way

    is_known = options.run_dir is not None or options.is_head
    disk = DiskWriter(root=options.run_directory(plan.run_id).path if is_known else None)
    disk.start()
    work = _node_work(options, disk, folder, done=spawner is not None)
    sweep_beside(plan.run_id)
    voice = _make_voice(launch, disk, folder)
    try:
        code = asyncio.run(_run(launch, spawner, socket_path, disk, voice, work))
        disk.on_loss = None  # the loop that would be told has ended
        with contextlib.suppress(KeyboardInterrupt):  # of who waits for a slow reader
            voice.flush(_FLUSH_S)
        disk.flush(_FLUSH_S)
        return code
    finally:
        if work is not None and work.scratch is not None:
            from torchmuster.node.leftovers import remove_scratch

            remove_scratch(work.scratch)


def _node_work(
    options: "AgentOptions", disk: DiskWriter, socket_folder: str, *, done: bool
) -> "NodeWork | None":
    """Return what this node does before its workers; None under `muster torchrun`, which has nothing of the kind."""
    if options.run_dir is None:
        return None
    from torchmuster.node.setup import NodeWork

    work = NodeWork(options, disk, socket_folder)
    if done:
        work.try_at_once()
    return work


async def _run(
    launch: AgentLaunch,
    spawner: tuple[HasStatus, Any] | None,
    socket_path: str,
    disk: DiskWriter,
    voice: "Voice",
    work: "NodeWork | None",
) -> int:
    from torchmuster.node.agent import Agent
    from torchmuster.programs.head_host import HeadHost

    options = launch.agent
    host = HeadHost(disk, voice)
    agent = Agent(options, spawner, socket_path, disk, voice, work, host.ports.take)
    successor = _make_successor(launch, agent, host, disk)
    for note in launch.notes:
        voice.say(note)
    shared = share_threads(dict(os.environ), options.num_workers)
    if shared is not None and THREADS not in dict(options.plan.node_setup.environment):
        agent.tell(shared)
    if launch.lifeline_fd is not None:
        _watch_lifeline(launch.lifeline_fd, agent)
    if launch.head is not None and launch.listening is not None:
        host.begin(launch.head, launch.listening, options.head, agent)
    if successor is not None:
        agent.spawn(successor.watch())
    try:
        code = await agent.run()
    except MusterError as error:
        voice.print(_plain(error))
        code = error.exit_code
    finally:
        await host.end()
        if successor is not None:
            await successor.end()
        if launch.head is not None and launch.head.spread is not None:
            await launch.head.spread.close()
    if launch.error_file is not None and code and agent.error_text is not None:
        disk.replace(launch.error_file, agent.error_text.encode())
    return code


def _make_successor(
    launch: AgentLaunch, agent: "Agent", host: "HeadHost", disk: DiskWriter
) -> "Successor | None":
    """Return what watches a head that this agent may replace."""
    if launch.agent.head.heirs is None:
        return None
    from torchmuster.programs.successor import Successor

    return Successor(launch.agent, agent, host, disk)


def _make_voice(launch: AgentLaunch, disk: DiskWriter, socket_folder: str) -> "Voice":
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.node.output import LogVoice

    if launch.agent_log is not None:
        return LogVoice(launch.agent_log, disk)
    has_template = bool(launch.agent.environment.get(contract.PREFIX_VARIABLE))
    voice = TerminalVoice(prefix_always=launch.agent.num_workers > 1 or has_template)
    voice.start()

    def unread() -> str:
        folder = disk.folder or socket_folder
        return os.path.join(folder, f"unread-{launch.agent.host}-{os.getpid()}")

    voice.write_every_line(unread, disk)
    return voice


def _watch_lifeline(fd: int, agent: "Agent") -> None:
    import asyncio

    def end() -> None:
        asyncio.get_running_loop().remove_reader(fd)
        agent.fail(MusterError("the owner of this run has gone, so its workers were ended"))

    asyncio.get_running_loop().add_reader(fd, end)


def _plain_report(report: Any) -> str:
    from torchmuster.model.display.text import render_report

    return render_report(report)


def _plain(error: MusterError) -> str:
    from torchmuster.model.display.text import report_of_error

    return _plain_report(report_of_error(error))
