"""A spawner behind a wrapper command (`conda run`, `apptainer exec`, `uv run`).

A wrapper may close what it inherits, so its Python calls a socket in the agent's own 0700 folder. What the wrapper
prints on standard error is kept: when it ends before its Python has called, that is the reason.
"""

import contextlib
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchmuster import proc
from torchmuster.net.ipc import caller_of
from torchmuster.node.door.forked import HasStatus
from torchmuster.node.spawner.link import BUFFER_BYTES, SpawnerLink, send_first
from torchmuster.node.spawner.messages import SpawnerEvent

_FIRST_SAY_S = 4.0
_SAY_EVERY_S = 15.0
_LOOK_EVERY_S = 0.05
_TAIL_LINES = 12


class SpawnerServer:
    """Where the spawner of a wrapper calls."""

    def __init__(self, folder: str, config: bytes) -> None:
        self.config = config
        self.path = os.path.join(folder, f"spawner-{secrets.token_hex(4)}.sock")
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listening.bind(self.path)
        self.listening.listen(4)
        self.listening.setblocking(False)
        self.stderr: int | None = None
        self.command = ""

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> proc.Child:
        """Start the wrapper.

        Raises:
            MusterError: It can't be executed.
        """
        self.command = " ".join(argv[: argv.index("spawner") - 1])
        self.stderr, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            return proc.start(argv, env=env, cwd=cwd, stderr=theirs)
        except BaseException:
            self.close()
            os.close(self.stderr)
            raise
        finally:
            os.close(theirs)

    def close(self) -> None:
        """Take no more calls."""
        self.listening.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def accept(self) -> tuple[socket.socket, int] | None:
        """Return the next call of this user with the caller's pid; None when there is none."""
        while True:
            try:
                connection, _ = self.listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return None
            pid = caller_of(connection)
            if pid is not None:
                return connection, pid
            connection.close()


class WrappedLink(SpawnerLink):
    """The link to a spawner that has yet to call."""

    def __init__(
        self,
        child: HasStatus,
        desk: SpawnerServer,
        on_event: Callable[[SpawnerEvent], None],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(child, desk.listening, on_event, on_end)
        self._desk = desk
        self._spawner: proc.ProcessFacts | None = None
        self._is_waiting = True
        self._started_at = time.monotonic()
        self._say_at = self._started_at + _FIRST_SAY_S
        self._said: deque[str] = deque(maxlen=_TAIL_LINES)
        self._handle: Any = None

    @property
    def pid(self) -> int:
        """Return the process id of the spawner, of the wrapper as long as that has not called."""
        return self._spawner.pid if self._spawner is not None else self._child.pid

    def open(self) -> None:
        """Wait for the call."""
        loop = _loop()
        loop.add_reader(self._desk.listening, self._take_call)
        if self._desk.stderr is not None:
            os.set_blocking(self._desk.stderr, False)
            loop.add_reader(self._desk.stderr, self._read_stderr)
        self._handle = loop.call_later(_LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Close the connection; the spawner ends its children and itself."""
        if self._is_waiting:
            self._stop_waiting()
        super().close()
        self._read_stderr()
        if self._desk.stderr is not None:
            _loop().remove_reader(self._desk.stderr)
            os.close(self._desk.stderr)
            self._desk.stderr = None

    def kill(self) -> None:
        """SIGKILL the wrapper, and the spawner if it is still the process that called."""
        proc.kill_quietly(self._child.pid)
        known = self._spawner
        now = proc.read_process(known.pid) if known is not None else None
        if known is not None and now is not None and now.start_ticks == known.start_ticks:
            proc.kill_quietly(known.pid)

    def last_words(self) -> dict[str, str]:
        """Return what the wrapper said last, as the reason of a refusal."""
        if self._spawner is not None or not self._said:
            return {}
        return {
            "what": f"`{self._desk.command}` ended before its Python had started",
            "hint": "try it by hand on that node, with `-c 'import torch'` after it",
        }

    @property
    def said(self) -> str:
        """Return the last lines of the wrapper's standard error."""
        return "\n".join(self._said)

    def _look(self) -> None:
        """See whether the wrapper has ended; say what is waited for."""
        if not self._is_waiting:
            return
        status = self.exit_status()
        if status is not None:
            self._take_call()  # it may have called in its last moment
            if self._is_waiting:
                self.close()
                self._on_end()
            return
        now = time.monotonic()
        if now >= self._say_at:
            self._say_at = now + _SAY_EVERY_S
            self.tell(f"waiting for `{self._desk.command}` to start its Python")
        self._handle = _loop().call_later(_LOOK_EVERY_S, self._look)

    def _take_call(self) -> None:
        call = self._desk.accept() if self._is_waiting else None
        if call is None:
            return
        self._stop_waiting()
        self._control, pid = call
        self._spawner = proc.read_process(pid)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._control.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        send_first(self._control, self._desk.config)
        super().open()
        self._send_waiting()

    def _stop_waiting(self) -> None:
        self._is_waiting = False
        if self._handle is not None:
            self._handle.cancel()
        _loop().remove_reader(self._desk.listening)
        self._desk.close()

    def _read_stderr(self) -> None:
        while self._desk.stderr is not None:
            try:
                data = os.read(self._desk.stderr, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                _loop().remove_reader(self._desk.stderr)
                os.close(self._desk.stderr)
                self._desk.stderr = None
                return
            text = data.decode(errors="replace")
            self._said += [line.rstrip() for line in text.splitlines() if line.strip()]
            self.say(text)


def _loop() -> Any:
    import asyncio

    return asyncio.get_running_loop()
