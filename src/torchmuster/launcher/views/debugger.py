"""The client's side of `--debugpy` and `--pdb`: connects the user's debugger to the waiting rank.

The run's record says which rank waits, and where. The connection is that of `muster exec`, over the
run's authenticated channel, so it works on every engine. An editor connects to a loopback port of
this machine, which accepts only this user's connections; pdb gets the terminal.
"""

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import contract
from torchmuster.core.model.events import DebuggerWaitsEvent
from torchmuster.core.owner.record import Follow
from torchmuster.errors import MusterError
from torchmuster.launcher.net.port_owner import is_own_connection
from torchmuster.launcher.views.execute import ExecOrder, ExecResult, Write
from torchmuster.launcher.views.find import view_run
from torchmuster.launcher.views.ranks import execute_at_rank

USUAL_PORT = 5678  # editors propose this one
_LOOK_EVERY_S = 0.1


class DebuggerServer:
    """Waits, in a thread, for ranks of the followed run that ask for a debugger, and connects them.

    Args:
        run_dir: Directory of the run.
        folder: The program's working directory on this machine.
        say: Prints a message to the user.
        print_text: Prints text unchanged.
    """

    def __init__(
        self,
        run_dir: RunDir,
        folder: str,
        say: Callable[[str], None],
        print_text: Callable[[str], None],
    ) -> None:
        self._run_dir, self._folder = run_dir, folder
        self._say, self._print = say, print_text
        self._ends = threading.Event()
        self._listener: socket.socket | None = None
        self._terminal = asyncio.Lock()  # one pdb session at a time has the terminal

    def start(self) -> None:
        """Start to wait."""
        threading.Thread(target=self._work, name="debugger", daemon=True).start()

    def close(self) -> None:
        """Accept no further connections, and end the open ones."""
        self._ends.set()

    def _work(self) -> None:
        asyncio.run(self._watch())

    async def _watch(self) -> None:
        follow = Follow(self._run_dir.events)
        sessions: set[asyncio.Task[None]] = set()
        rank = -1
        while not self._ends.is_set():
            for one in follow.events():
                if not isinstance(event := one.event, DebuggerWaitsEvent):
                    continue
                rank = event.rank
                if event.tool == contract.DEBUGPY:
                    self._listen()
                    self._print(launch_text(event, self._port, self._folder))
                else:
                    sessions.add(asyncio.create_task(self._open_pdb(event)))
            stream = self._accept()
            if stream is not None:
                sessions.add(asyncio.create_task(self._carry(rank, stream)))
            sessions = {task for task in sessions if not task.done()}
            await asyncio.sleep(_LOOK_EVERY_S)
        for task in sessions:
            task.cancel()
        if self._listener is not None:
            self._listener.close()

    # An editor.

    @property
    def _port(self) -> int:
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    def _listen(self) -> None:
        for port in (USUAL_PORT, 0) if self._listener is None else ():
            with contextlib.suppress(OSError):
                self._listener = socket.create_server(("127.0.0.1", port), backlog=4)
                self._listener.setblocking(False)
                return

    def _accept(self) -> socket.socket | None:
        if self._listener is None:
            return None
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return None
        stream.setblocking(True)
        if is_own_connection(stream):
            return stream
        self._say("a connection of another user to the debugger's port was closed")
        stream.close()
        return None

    async def _carry(self, rank: int, stream: socket.socket) -> None:
        with stream:

            def write(task: str, number: int, data: bytes) -> None:
                del task
                if number == 1:
                    stream.sendall(data)
                else:
                    self._say(data.decode(errors="replace"))

            await self._session(rank, stream.fileno(), write)
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    # pdb.

    async def _open_pdb(self, event: DebuggerWaitsEvent) -> None:
        rank = event.rank
        what, keys = "has failed", "`q` ends the run"
        if event.tool == contract.PDB_STOPS:
            what, keys = "has stopped", "`c` goes on, `q` ends the run"
        self._say(f"rank {rank} on {event.node} {what}; all ranks wait while you look ({keys})")

        def write(task: str, number: int, data: bytes) -> None:
            del task, number
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]

        async with self._terminal:
            await self._session(rank, 0, write)

    async def _session(self, rank: int, input_fd: int, write: Write) -> ExecResult | None:
        order = ExecOrder(argv=(), input_fd=input_fd, debugger=True)
        try:
            return await execute_at_rank(view_run(self._run_dir), f"rank {rank}", order, write)
        except MusterError as error:
            self._say(f"the debugger does not reach rank {rank}: {error.what}")
            return None


def launch_text(event: DebuggerWaitsEvent, port: int, folder: str) -> str:
    """Return what a user needs to attach an editor: a sentence and a launch.json."""
    rank, remote = event.rank, event.folder or folder
    configuration = {
        "name": f"muster: rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
        "pathMappings": [{"localRoot": folder, "remoteRoot": remote}],
    }
    launch = {"version": "0.2.0", "configurations": [configuration]}
    return (
        f"muster: attach your editor to 127.0.0.1:{port}; for VS Code as .vscode/launch.json:\n"
        f"{json.dumps(launch, indent=2)}\n"
    )
