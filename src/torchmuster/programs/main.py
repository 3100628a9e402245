"""One agent process from its first line to its last.

The spawner is started before anything else is imported: its `import torch` takes a second, in which the
agent gets ready and finds the others.
"""

import os
import shutil
import socket
import sys
from typing import TYPE_CHECKING, Any

from torchmuster.errors import MusterError, found_bug
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.head.options import OWNER_S
from torchmuster.model import codec, contract
from torchmuster.node.door.forked import HasStatus
from torchmuster.node.environment import THREADS, share_threads
from torchmuster.node.leftovers import make_socket_folder, sweep_beside
from torchmuster.node.spawner.start import begin_spawner, start_spawner
from torchmuster.programs.launch import AgentLaunch, read_launch

if TYPE_CHECKING:
    import asyncio

    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.head.options import TrainingHeadOptions
    from torchmuster.head.training_head import TrainingHead
    from torchmuster.model.verdict import Result
    from torchmuster.net.messages import Event
    from torchmuster.node.agent import Agent
    from torchmuster.node.options import AgentOptions, HeadPlace
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
    try:
        return asyncio.run(_run(launch, spawner, socket_path, disk, work))
    finally:
        if work is not None and work.scratch is not None:
            from torchmuster.node.scratch import remove_scratch

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
    work: "NodeWork | None",
) -> int:
    import asyncio

    from torchmuster.node.agent import Agent

    options = launch.agent
    voice = _make_voice(launch, disk)
    desk = StorePorts()
    take_store = desk.take if options.is_head else None
    agent = Agent(options, spawner, socket_path, disk, voice, work, take_store)
    for note in launch.notes:
        voice.say(note)
    shared = share_threads(dict(os.environ), options.num_workers)
    if shared is not None and THREADS not in dict(options.plan.node_setup.environment):
        agent.tell(shared)
    if launch.lifeline_fd is not None:
        _watch_lifeline(launch.lifeline_fd, agent)
    conduct = head = None
    if launch.head is not None and launch.listening is not None:
        head = _make_head(launch.head, desk, disk, voice)
        conduct = asyncio.create_task(_conduct(head, launch.listening, options.head))
        conduct.add_done_callback(lambda task: _end_with_head(task, agent))
    try:
        code = await agent.run()
    except MusterError as error:
        voice.print(_plain(error))
        code = error.exit_code
    finally:
        if conduct is not None:
            late_s = OWNER_S if head is not None and head.is_over else 0.0
            await asyncio.wait({conduct}, timeout=3.0 + late_s)
            conduct.cancel()
        if launch.head is not None and launch.head.spread is not None:
            await launch.head.spread.close()
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
    has_template = bool(launch.agent.environment.get(contract.PREFIX_VARIABLE))
    voice = TerminalVoice(prefix_always=launch.agent.num_workers > 1 or has_template)
    voice.start()
    return voice


def _watch_lifeline(fd: int, agent: "Agent") -> None:
    import asyncio

    def end() -> None:
        asyncio.get_running_loop().remove_reader(fd)
        agent.fail(MusterError("the owner of this run has gone, so its workers were ended"))

    asyncio.get_running_loop().add_reader(fd, end)


def _make_head(
    options: "TrainingHeadOptions", desk: StorePorts, disk: DiskWriter, voice: "Voice"
) -> "TrainingHead":
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.head.training_head import TrainingHead

    show = _teller(voice, options.run_dir) if isinstance(voice, TerminalVoice) else None
    head = TrainingHead(options, disk, desk.open, show)
    if options.spread is not None:
        options.spread.begin(head.event)
    return head


async def _conduct(head: "TrainingHead", listening: socket.socket, place: "HeadPlace") -> "Result":
    import asyncio

    from torchmuster.net.listener import Listener
    from torchmuster.net.store_relay import StoreRelay

    relay = StoreRelay(head.store_address, head.notice) if head.options.relay_port else None
    secrets = (place.secret, place.open_secret)
    listener = Listener(listening, secrets, head.serve, head.refuse_stranger, relay)
    serving = [asyncio.create_task(listener.serve())]
    if head.plan.metrics_port is not None:
        serving.append(asyncio.create_task(_tell_metrics(head, head.plan.metrics_port)))
    try:
        return await head.conduct()
    finally:
        for task in serving:
            task.cancel()


async def _tell_metrics(head: "TrainingHead", port: int) -> None:
    """Serve the page of metrics; a port that is taken ends no run."""
    from torchmuster.head.openmetrics import CONTENT_TYPE
    from torchmuster.net.address import bind
    from torchmuster.net.scrape import MetricsPage

    try:
        listening = bind("127.0.0.1", port)
    except OSError as error:
        head.notice(f"no metrics at 127.0.0.1:{port}: {error.strerror}")
        return
    head.notice(f"metrics for Prometheus at http://127.0.0.1:{port}/metrics of this node")
    await MetricsPage(CONTENT_TYPE, head.metrics).serve(listening)


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
