"""One agent process from start to end.

The spawner is started before other imports: its `import torch` takes a second, in which the agent
gets ready and connects to the others.
"""

import contextlib
import os
import shutil
import socket
import sys
from typing import TYPE_CHECKING, Any

from torchmuster.core import plugs
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.model import contract
from torchmuster.core.node.options import THREADS, AgentOptions, share_threads
from torchmuster.core.node.setup import make_socket_folder, start_sweep
from torchmuster.core.node.spawner.start import begin_spawner, start_spawner
from torchmuster.core.proc import HasStatus
from torchmuster.core.programs.launch import AgentLaunch, read_launch
from torchmuster.errors import MusterError

if TYPE_CHECKING:
    from torchmuster.core.node.agent import Agent
    from torchmuster.core.node.output import Voice
    from torchmuster.core.node.setup import NodeWork
    from torchmuster.core.programs.head_host import HeadHost


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
    start_sweep(plan.run_id)
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


def _make_successor(launch: AgentLaunch, agent: "Agent", host: "HeadHost", disk: DiskWriter) -> Any:
    """Return the watcher of a head that this agent may replace, or None."""
    if launch.agent.head.heirs is None:
        return None
    make = plugs.find("successors", "job")
    return make(launch.agent, agent, host, disk) if make is not None else None


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


def _plain_report(report: Any) -> str:
    from torchmuster.core.model.text import render_report

    return render_report(report)


def _plain(error: MusterError) -> str:
    from torchmuster.core.model.text import report_of_error

    return _plain_report(report_of_error(error))
