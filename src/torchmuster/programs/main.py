"""One agent process from its first line to its last.

The spawner is started before anything else is imported: its `import torch` takes a second, in which the
agent gets ready and finds the others.
"""

import os
import shutil
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchmuster import proc
from torchmuster.errors import MusterError, found_bug
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.model import codec, contract
from torchmuster.node.environment import THREADS, share_threads
from torchmuster.node.leftovers import make_socket_folder, sweep_beside
from torchmuster.node.spawner.start import start_spawner
from torchmuster.programs.launch import AgentLaunch, read_launch

if TYPE_CHECKING:
    import asyncio

    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.model.verdict import Result
    from torchmuster.net.messages import Event
    from torchmuster.node.agent import Agent
    from torchmuster.node.setup import NodeWork
    from torchmuster.node.voice import Voice

_FLUSH_S = 5.0
EX_SOFTWARE = 70


class StorePorts:
    """Binds the port of every attempt's store before anyone needs it.

    The port is known, and callers queue in the kernel, before the store's process has begun.
    """

    def __init__(self) -> None:
        self._listening: dict[int, socket.socket] = {}

    def open(self, attempt: int, address: str) -> int:
        """Bind a port for an attempt and return it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.bind((address, 0))
            listening.listen(4096)
        except OSError:
            listening.close()
            raise
        self._listening[attempt] = listening
        return int(listening.getsockname()[1])

    def take(self, attempt: int) -> socket.socket | None:
        """Return the listening socket of an attempt, once."""
        return self._listening.pop(attempt, None)


def main(arguments: list[str]) -> None:
    """Run the agent that a client or an engine has asked for on the command line."""
    try:
        launch = read_launch(arguments)
    except MusterError as error:
        sys.stderr.write(_plain(error))
        os._exit(error.exit_code)
    os._exit(run_agent(launch))


def run_agent(launch: AgentLaunch) -> int:
    """Run an agent to its end and return its exit code."""
    folder = make_socket_folder()
    socket_path = os.path.join(folder, "agent.sock")
    setup = launch.plan.node_setup
    environment = {**launch.environment, **dict(setup.environment)}
    spawner = None
    if not setup.lines:  # they may change the interpreter and its variables
        try:
            spawner = start_spawner(launch.plan.program, environment, socket_path)
        except MusterError as error:
            if not launch.sets_node_up:
                shutil.rmtree(folder, ignore_errors=True)
                sys.stderr.write(_plain(error))
                return error.exit_code
            # The agent tries again, with what this node has.
    import asyncio  # after the spawner is on its way

    is_known = launch.run_dir is not None or launch.listening is not None
    run_dir = launch.run_directory(launch.plan.run_id).path
    disk = DiskWriter(root=run_dir if is_known else None)
    disk.start()
    work = _node_work(launch, disk, folder, done=spawner is not None)
    sweep_beside(launch.plan.run_id)
    try:
        return asyncio.run(_run(launch, spawner, socket_path, disk, work))
    finally:
        if work is not None and work.scratch is not None:
            from torchmuster.node.scratch import remove_scratch

            remove_scratch(work.scratch)


def _node_work(
    launch: AgentLaunch, disk: DiskWriter, socket_folder: str, *, done: bool
) -> "NodeWork | None":
    """Return what this node does before its workers; None when that is nothing."""
    from torchmuster.node.setup import NodeWork, SetupOrder

    plan = launch.plan
    if not launch.sets_node_up or launch.place is None:
        return None
    order = SetupOrder(
        setup=plan.node_setup,
        program=plan.program,
        environment=launch.environment,
        node=launch.host,
        place=launch.place,
        run_id=plan.run_id,
        run_dir=launch.run_directory(plan.run_id),
        socket_folder=socket_folder,
    )
    work = NodeWork(order, disk)
    if done:
        work.try_at_once()
    return work


async def _run(
    launch: AgentLaunch,
    spawner: tuple[proc.Child, Any] | None,
    socket_path: str,
    disk: DiskWriter,
    work: "NodeWork | None",
) -> int:
    import asyncio

    from torchmuster.node.agent import Agent

    voice = _make_voice(launch, disk)
    desk = StorePorts()
    agent = Agent(_agent_options(launch, desk), spawner, socket_path, disk, voice, work)
    for note in launch.notes:
        voice.say(note)
    shared = share_threads(dict(os.environ), launch.num_workers)
    if shared is not None and THREADS not in dict(launch.plan.node_setup.environment):
        agent.tell(shared)
    if launch.lifeline_fd is not None:
        _watch_lifeline(launch.lifeline_fd, agent)
    conduct = None
    if launch.listening is not None:
        conduct = asyncio.create_task(_conduct(launch, desk, disk, voice))
        conduct.add_done_callback(lambda task: _end_with_head(task, agent))
    try:
        code = await agent.run()
    except MusterError as error:
        voice.print(_plain(error))
        code = error.exit_code
    finally:
        if conduct is not None:
            await asyncio.wait({conduct}, timeout=3.0)
            conduct.cancel()
        if launch.spread is not None:
            await launch.spread.close()
    if launch.error_file is not None and code and agent.error_text is not None:
        disk.replace(launch.error_file, agent.error_text.encode())
    voice.flush(_FLUSH_S)
    disk.flush(_FLUSH_S)
    return code


def _make_voice(launch: AgentLaunch, disk: DiskWriter) -> "Voice":
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.node.voice import LogVoice

    if launch.agent_log is not None:
        return LogVoice(launch.agent_log, disk)
    has_template = bool(launch.environment.get(contract.PREFIX_VARIABLE))
    voice = TerminalVoice(prefix_always=launch.num_workers > 1 or has_template)
    voice.start()
    return voice


def _agent_options(launch: AgentLaunch, desk: StorePorts) -> Any:
    from torchmuster.node.head_link import HeadPlace
    from torchmuster.node.options import AgentOptions

    return AgentOptions(
        program=launch.plan.program,
        num_workers=launch.num_workers,
        host=launch.host,
        head=HeadPlace(
            addresses=launch.addresses,
            secret=launch.secret,
            open_secret=launch.open_secret,
            join_timeout_s=launch.plan.limits.join_timeout_s,
        ),
        run_dir=launch.run_directory,
        place=launch.place,
        role=launch.plan.role,
        is_head=launch.listening is not None,
        take_store=desk.take if launch.listening is not None else None,
        local_show=launch.local_show,
        terminal=launch.terminal,
        virtual_local_rank=launch.plan.virtual_local_rank,
        rdzv_id=launch.plan.rdzv_id,
        local_addr=launch.local_addr,
        console=launch.console,
        saved=launch.saved,
        stdin_fd=0 if launch.local_show and launch.plan.stdin_rank is not None else None,
        signals=launch.signals,
        environment={**launch.environment, **dict(launch.plan.node_setup.environment)},
        jobs=launch.jobs,
    )


def _watch_lifeline(fd: int, agent: "Agent") -> None:
    import asyncio

    def end() -> None:
        asyncio.get_running_loop().remove_reader(fd)
        agent.fail(MusterError("the owner of this run has gone, so its workers were ended"))

    asyncio.get_running_loop().add_reader(fd, end)


async def _conduct(
    launch: AgentLaunch, desk: StorePorts, disk: DiskWriter, voice: "Voice"
) -> "Result":
    import asyncio

    from torchmuster.head.training_head import TrainingHead, TrainingHeadOptions
    from torchmuster.net.listener import Listener
    from torchmuster.net.store_relay import StoreRelay

    listening = launch.listening
    if listening is None:
        raise ValueError("only the head conducts a run")
    relay_port = int(listening.getsockname()[1]) if launch.relays_store else 0
    options = TrainingHeadOptions(
        plan=launch.plan,
        run_dir=launch.run_directory(launch.plan.run_id),
        open_store=desk.open,
        own_address=launch.own_address,
        first_attempt=launch.first_attempt,
        restarts_spent=launch.restarts_spent,
        on_event=_listener(launch, voice),
        on_need=launch.spread.need if launch.spread is not None else None,
        is_ours=launch.spread.is_ours if launch.spread is not None else None,
        hint=launch.hint,
        relay_port=relay_port,
        jobs=launch.jobs,
    )
    head = TrainingHead(options, disk)
    if launch.spread is not None:
        launch.spread.begin(head.event)
    listener = Listener(
        listening,
        (launch.secret, launch.open_secret),
        head.serve,
        head.refuse_stranger,
        StoreRelay(head.store_address, head.notice) if relay_port else None,
    )
    serving = asyncio.create_task(listener.serve())
    try:
        return await head.conduct()
    finally:
        serving.cancel()


def _listener(launch: AgentLaunch, voice: "Voice") -> "Callable[[Event], None] | None":
    from torchmuster.files.terminal import TerminalVoice

    run_dir = launch.run_directory(launch.plan.run_id)
    tell = _teller(voice, run_dir) if isinstance(voice, TerminalVoice) else None
    spread = launch.spread
    if spread is None:
        return tell

    def hear(event: "Event") -> None:
        spread.hear(event)
        if tell is not None:
            tell(event)

    return hear


def _teller(voice: "TerminalVoice", run_dir: RunDir) -> Any:
    def tell(event: "Event") -> None:
        if event.name == "run_ended" and event.fields.get("report"):
            from torchmuster.diagnose.explain.end_of_run import explained
            from torchmuster.model.display.repeats import shortened
            from torchmuster.model.verdict import Result

            result = codec.from_plain(Result, event.fields)
            report = explained(result, run_dir)
            if report is not None:
                voice.print(_plain_report(shortened(report, result, voice.shown)))
            return
        voice.tell(event.name, event.fields)

    return tell


def _end_with_head(task: "asyncio.Task[Result]", agent: "Agent") -> None:
    """A head that ends, or breaks, must not leave its agent waiting."""
    if task.cancelled():
        return
    if task.exception() is None:
        agent.leave(task.result().exit_code)
        return
    error = found_bug("the head of the run", task.exception())
    error.exit_code = EX_SOFTWARE
    agent.fail(error)


def _plain_report(report: Any) -> str:
    from torchmuster.model.display.text import render_report

    return render_report(report)


def _plain(error: MusterError) -> str:
    from torchmuster.model.display.text import report_of_error

    return _plain_report(report_of_error(error))
