"""One agent process, from the command line that an owner or an engine has written to its end.

The spawner is started before other imports: its `import torch` takes a second, in which the agent
gets ready and connects to the others.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchmuster.core import plugs
from torchmuster.core.files.claims import Claims
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir, size_of, trained_last
from torchmuster.core.head.options import HeadCredentials, TrainingHeadOptions
from torchmuster.core.model import codec, contract
from torchmuster.core.model.codec import from_arguments, moment_of
from torchmuster.core.model.lines import Terminal
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.net.address import read_secret, split_endpoint
from torchmuster.core.node.options import (
    THREADS,
    AgentOptions,
    AgentOrder,
    HeadPlace,
    share_threads,
    take_environment,
)
from torchmuster.core.node.setup import make_socket_folder, start_removing_leftovers
from torchmuster.core.node.spawner.start import begin_spawner, start_spawner
from torchmuster.core.proc import HasStatus
from torchmuster.errors import MusterError

if TYPE_CHECKING:
    from torchmuster.core.node.agent import Agent
    from torchmuster.core.node.output import Voice
    from torchmuster.core.node.setup import NodeWork


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLaunch:
    """One process with an agent, and at place 0 with the head of its run.

    Attributes:
        head: The head's options; None on other nodes, as is its socket `listening`.
        lifeline_fd: Its end of file means that the owner of the run is gone.
        agent_log: Log file of the agent; None: this terminal.
        notes: Sentences to print first.
        error_file: File for the failure in torchrun's JSON.
    """

    agent: AgentOptions
    head: TrainingHeadOptions | None = None
    listening: socket.socket | None = None
    lifeline_fd: int | None = None
    agent_log: str | None = None
    notes: tuple[str, ...] = ()
    error_file: str | None = None


def read_launch(arguments: list[str]) -> AgentLaunch:
    """Return the launch for an agent's command line, with plan and key from its run directory."""
    order = from_arguments(AgentOrder, arguments)
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
        credentials = None
        if order.term is not None:  # another node may replace this head
            claims = Claims(run_dir.succession)
            place, holder = order.place, order.holder
            credentials = HeadCredentials(
                claims=claims, term=order.term, holder=holder, place=place, node=name
            )
        head = TrainingHeadOptions(
            plan=plan,
            run_dir=run_dir,
            own_address=addresses[0][0],
            first_attempt=order.first_attempt,
            restarts_spent=order.restarts_spent,
            why=f"after attempt {order.first_attempt - 1}" if order.first_attempt else "start",
            samples_bytes=size_of(run_dir.samples),
            has_owner=order.lifeline_fd is not None,
            credentials=credentials,
            left_out=machines_left_out(run_dir) if order.first_attempt else frozenset(),
            expected=trained_last(plan, run_dir)
            if order.first_attempt and plan.spares
            else frozenset(),
            began_at=began_at(run_dir) if order.first_attempt else 0.0,
        )
    program = plan.program
    if plan.is_session:  # its server, with this node's interpreter and run directory
        first, *flags = program.python
        words = (*flags, plugs.entry("session_server"), run_dir.path)
        program = replace(program, target=first, args=words)
    agent = AgentOptions(
        plan=replace(plan, program=program),
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


def read_plan_file(path: str) -> RunPlan:
    """Return the plan in a run directory, as seen by this node."""
    with open(RunDir(path).plan) as file:
        return codec.from_plain(RunPlan, json.load(file))


def machines_left_out(run_dir: RunDir) -> frozenset[str]:
    """Return machines that computed wrong results in this run, earlier jobs included."""
    found: set[str] = set()
    try:
        with open(run_dir.events, errors="replace") as record:
            for line in record:
                if '"event":"node_left_out"' in line:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        found.add(str(json.loads(line)["machine"]))
    except OSError:  # nothing is known
        return frozenset()
    return frozenset(found)


def began_at(run_dir: RunDir) -> float:
    """Return when the run's first head began, from its record; 0 if unknown."""
    try:
        with open(run_dir.events, errors="replace") as record:
            starts = (line for line in record if '"event":"run_started"' in line)
            return moment_of(json.loads(next(starts, "{}")).get("time")) or 0.0
    except (OSError, ValueError):
        return 0.0


def job_environment(num_workers: int) -> dict[str, str]:
    """Return the environment for the job's interpreter: ours with torchrun's additions."""
    environment = dict(os.environ)
    share_threads(environment, num_workers)
    return environment


_FLUSH_S = 5.0


def main(arguments: list[str]) -> None:
    """Run the agent that the command line describes."""
    os._exit(run_agent(read_launch(arguments)))


def run_agent(launch: AgentLaunch, forked: tuple[HasStatus, socket.socket] | None = None) -> int:
    """Run an agent to its end; return its exit code.

    `forked` is a spawner waiting for its first packet, if a server has forked one.
    """
    options, plan = launch.agent, launch.agent.plan
    folder = make_socket_folder()
    socket_path = os.path.join(folder, "agent.sock")
    spawner: tuple[HasStatus, Any] | None = None
    if forked is not None:
        begin_spawner(forked[1], plan.program, socket_path)
        spawner = forked
    elif not plan.node_setup.lines:  # set-up lines may change interpreter and variables
        try:
            spawner = start_spawner(plan.program, options.environment, socket_path)
        except MusterError as error:
            if options.run_dir is None:
                shutil.rmtree(folder, ignore_errors=True)
                sys.stderr.write(_plain(error))
                return error.exit_code
            # The agent tries again with this node's own environment.
    import asyncio  # after the spawner has started

    is_known = options.run_dir is not None or options.is_head
    disk = DiskWriter(root=options.run_directory(plan.run_id).path if is_known else None)
    disk.start()
    work = _node_work(options, disk, folder, done=spawner is not None)
    start_removing_leftovers(plan.run_id)
    voice = _make_voice(launch, disk, folder)
    try:
        code = asyncio.run(_run(launch, spawner, socket_path, disk, voice, work))
        disk.on_loss = None  # its event loop has ended
        with contextlib.suppress(KeyboardInterrupt):  # while waiting for a slow reader
            voice.flush(_FLUSH_S)
        disk.flush(_FLUSH_S)
        return code
    finally:
        if work is not None and work.scratch is not None:
            from torchmuster.core.node.setup import remove_scratch

            remove_scratch(work.scratch)


def _node_work(
    options: "AgentOptions", disk: DiskWriter, socket_folder: str, *, done: bool
) -> "NodeWork | None":
    """Return the set-up work of this node; None under `muster torchrun`, which has none."""
    if options.run_dir is None:
        return None
    from torchmuster.core.node.setup import NodeWork

    kind = None if options.plan.node_setup.is_plain else plugs.find("node_work", "shell")
    work: NodeWork = (kind or NodeWork)(options, disk, socket_folder)
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
    from torchmuster.core.node.agent import Agent
    from torchmuster.core.programs.head_host import HeadHost

    options = launch.agent
    host = HeadHost(disk, voice)
    agent = Agent(options, spawner, socket_path, disk, voice, work, host.ports.take)
    successor: Any = None
    if options.head.heirs is not None and (make := plugs.find("successors", "job")) is not None:
        # It watches a head that this agent may replace.
        successor = make(options, agent, host, disk)
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


def _make_voice(launch: AgentLaunch, disk: DiskWriter, socket_folder: str) -> "Voice":
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.node.output import LogVoice

    if launch.agent_log is not None:
        return LogVoice(launch.agent_log, disk)
    has_template = bool(launch.agent.environment.get(contract.PREFIX_VARIABLE))
    voice = TerminalVoice(prefix_always=launch.agent.num_workers > 1 or has_template)
    voice.start()

    def unread() -> str:
        folder = disk.root or socket_folder
        return os.path.join(folder, f"unread-{launch.agent.host}-{os.getpid()}")

    voice.write_every_line(unread, disk)
    return voice


def _watch_lifeline(fd: int, agent: "Agent") -> None:
    import asyncio

    def end() -> None:
        asyncio.get_running_loop().remove_reader(fd)
        agent.fail(MusterError("the owner of this run has gone, so its workers were ended"))

    asyncio.get_running_loop().add_reader(fd, end)


def _plain(error: MusterError) -> str:
    from torchmuster.core.model.text import render_report, report_of_error

    return render_report(report_of_error(error))
