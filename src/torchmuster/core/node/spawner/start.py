"""The agent's side of a spawner: starts it, sends it orders, receives its events.

Python itself gets one end of a socket pair; with a wrapper command, its Python calls a socket.
"""

import contextlib
import os
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchmuster.core import proc
from torchmuster.core.files.layout import muster_home
from torchmuster.core.model.codec import decode, encode
from torchmuster.core.model.lease import LEASE_S
from torchmuster.core.model.plan import Program
from torchmuster.core.net.ipc import caller_of
from torchmuster.core.node.spawner import messages
from torchmuster.core.proc import HasStatus

if TYPE_CHECKING:
    import asyncio


BUFFER_BYTES = 4 << 20
_MAX_PACKET_BYTES = 1 << 16


class SpawnerLink:
    """Sends orders and receives events; orders wait in a queue if the spawner reads slowly."""

    def __init__(
        self,
        child: HasStatus,
        control: socket.socket,
        on_event: Callable[[messages.SpawnerEvent], None],
        on_end: Callable[[], None],
    ) -> None:
        self._child = child
        self._control = control
        self._on_event = on_event
        self._on_end = on_end
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._open = False
        self.say: Callable[[str], None] = _drop  # gets what the spawner prints
        self.tell: Callable[[str], None] = _drop  # gets sentences for the user

    @property
    def pid(self) -> int:
        """Return the spawner's process id."""
        return self._child.pid

    def open(self) -> None:
        """Start listening to the spawner."""
        self._open = True
        _running_loop().add_reader(self._control, self._receive)

    def close(self) -> None:
        """Close the connection: the spawner ends its children and itself."""
        if self._open:
            self._open = False
            loop = _running_loop()
            loop.remove_reader(self._control)
            loop.remove_writer(self._control)
            self._control.close()
            for _, fds in self._waiting:
                _close_all(fds)

    def kill(self) -> None:
        """SIGKILL the spawner; its workers die with it."""
        proc.kill_quietly(self.pid)

    @property
    def said(self) -> str:
        """Return the last lines that the spawner printed, if they are kept."""
        return ""

    def last_words(self) -> dict[str, str]:
        """Return more fields for a refusal: why the spawner ended, in its own words."""
        return {}

    def exit_status(self) -> int | None:
        """Reap the spawner; return its exit status, None while it runs."""
        return self._child.poll()

    def order(self, message: messages.SpawnerOrder, fds: Sequence[int] = ()) -> None:
        """Send an order with descriptors, which are closed here once sent."""
        self._waiting.append(_packed(encode(message), tuple(fds)))
        if len(self._waiting) == 1:
            self._send_waiting()

    def _send_waiting(self) -> None:
        loop = _running_loop()
        while self._waiting and self._open:
            packet, fds = self._waiting[0]
            try:
                socket.send_fds(self._control, [packet], fds)
            except BlockingIOError:
                loop.add_writer(self._control, self._send_waiting)
                return
            except OSError:  # the spawner has ended; `_receive` reports it
                pass
            self._waiting.popleft()
            _close_all(fds)
        if self._open:
            loop.remove_writer(self._control)

    def _receive(self) -> None:
        try:
            packet = self._control.recv(_MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet:
            self._on_event(decode(packet, messages.SpawnerEvent))
            return
        self.close()
        self._on_end()


def send_first(control: socket.socket, data: bytes) -> None:
    """Send the first order and make the socket non-blocking."""
    packet, fds = _packed(data, ())
    socket.send_fds(control, [packet], fds)
    _close_all(fds)
    control.setblocking(False)


def _packed(data: bytes, fds: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
    if len(data) <= messages.MOST_IN_PACKET:
        return data, fds
    memory = os.memfd_create("order")
    with open(memory, "wb", closefd=False) as file:
        file.write(data)
    return messages.IN_MEMORY, (memory, *fds)


def _drop(text: str) -> None:
    """Ignore the text."""


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _running_loop() -> "asyncio.AbstractEventLoop":
    import asyncio  # the spawner's start need not wait these 20 ms

    return asyncio.get_running_loop()


# A spawner in a wrapper command (`conda run`, `apptainer exec`, `uv run`).
#
# A wrapper may close inherited descriptors, so its Python calls a socket in the agent's own 0700
# folder. Its standard error is kept: if the wrapper ends before its Python has called, that tells
# the reason.


_FIRST_SAY_S = 4.0
_SAY_EVERY_S = 15.0
_LOOK_EVERY_S = 0.05
_TAIL_LINES = 12


class SpawnerServer:
    """The listening socket that a spawner in a wrapper calls."""

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
        """Stop accepting calls."""
        self.listening.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def accept(self) -> tuple[socket.socket, int] | None:
        """Return this user's next call with the caller's pid; None if there is none."""
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
    """The link to a spawner in a wrapper, which has yet to call."""

    def __init__(
        self,
        child: HasStatus,
        desk: SpawnerServer,
        on_event: Callable[[messages.SpawnerEvent], None],
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
        """Return the spawner's process id, or the wrapper's until the spawner has called."""
        return self._spawner.pid if self._spawner is not None else self._child.pid

    def open(self) -> None:
        """Wait for the call."""
        loop = _running_loop()
        loop.add_reader(self._desk.listening, self._take_call)
        if self._desk.stderr is not None:
            os.set_blocking(self._desk.stderr, False)
            loop.add_reader(self._desk.stderr, self._read_stderr)
        self._handle = loop.call_later(_LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Close the connection: the spawner ends its children and itself."""
        if self._is_waiting:
            self._stop_waiting()
        super().close()
        self._read_stderr()
        if self._desk.stderr is not None:
            _running_loop().remove_reader(self._desk.stderr)
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
        """Return the fields of a refusal for a wrapper that ended before its Python called."""
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
        """Check whether the wrapper has ended; tell the user what we wait for."""
        if not self._is_waiting:
            return
        status = self.exit_status()
        if status is not None:
            self._take_call()  # it may have called just before
            if self._is_waiting:
                self.close()
                self._on_end()
            return
        now = time.monotonic()
        if now >= self._say_at:
            self._say_at = now + _SAY_EVERY_S
            self.tell(f"waiting for `{self._desk.command}` to start its Python")
        self._handle = _running_loop().call_later(_LOOK_EVERY_S, self._look)

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
        _running_loop().remove_reader(self._desk.listening)
        self._desk.close()

    def _read_stderr(self) -> None:
        while self._desk.stderr is not None:
            try:
                data = os.read(self._desk.stderr, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                _running_loop().remove_reader(self._desk.stderr)
                os.close(self._desk.stderr)
                self._desk.stderr = None
                return
            text = data.decode(errors="replace")
            self._said += [line.rstrip() for line in text.splitlines() if line.strip()]
            self.say(text)


def start_spawner(
    program: Program,
    env: Mapping[str, str],
    socket_path: str,
    refused: messages.ImportsRefused | None = None,
) -> tuple[proc.Child, Any]:
    """Start the job's interpreter; it imports torch while the agent gets ready.

    `refused` is the last event of an earlier spawner, which ended with it.

    Return the process, and the socket or the `SpawnerServer` that `make_link` takes.

    Raises:
        MusterError: The interpreter can't be executed.
    """
    entry = os.path.join(os.path.dirname(os.path.abspath(__file__)), "entry.py")
    if not is_interpreter(program.python[0]):
        desk = SpawnerServer(
            os.path.dirname(socket_path), _config(program, socket_path, refused, wrapped=True)
        )
        words = [*program.python, entry, "spawner", desk.path, "--", *program.display()]
        return desk.start(words, env, program.cwd), desk
    ours, theirs = control_pair()
    with theirs:
        child = proc.start(
            [*program.python, entry, "spawner", str(theirs.fileno()), "--", *program.display()],
            env=env,
            cwd=program.cwd,
            pass_fds=[theirs.fileno()],
        )
    begin_spawner(ours, program, socket_path, refused)
    return child, ours


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of the connection between an agent and its spawner."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        ours.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return ours, theirs


def begin_spawner(
    control: socket.socket,
    program: Program,
    socket_path: str,
    refused: messages.ImportsRefused | None = None,
) -> None:
    """Tell a spawner what it is for."""
    send_first(control, _config(program, socket_path, refused, wrapped=False))


def is_interpreter(word: str) -> bool:
    """Return whether a command is Python itself.

    Others (uv, conda, apptainer) may close inherited descriptors.
    """
    return (
        re.fullmatch(r"(python|pypy)[0-9.]*[a-z]*(-[a-z0-9]+)?", os.path.basename(word)) is not None
    )


def _config(
    program: Program, socket_path: str, refused: messages.ImportsRefused | None, *, wrapped: bool
) -> bytes:
    begin = messages.BeginSpawner(
        wrapped=wrapped,
        kind=program.kind.value,
        target=program.target,
        args=program.args,
        python=program.python,
        start=program.start.value,
        preload=program.preload,
        macros=program.macros,
        lease_s=LEASE_S,
        socket_path=socket_path,
        has_torch=program.has_torch,
        call_sha256=program.call.sha256 if program.call is not None else "",
        cache=os.path.join(muster_home(), "cache", "imports"),
        num_imports=refused.num_made if refused is not None else -1,
        imports_why=refused.why if refused is not None else "",
    )
    return encode(begin)


def make_link(
    child: HasStatus,
    control: Any,
    on_event: Callable[[messages.SpawnerEvent], None],
    on_end: Callable[[], None],
) -> SpawnerLink:
    """Return the link to a spawner that `start_spawner` has started."""
    if isinstance(control, socket.socket):
        return SpawnerLink(child, control, on_event, on_end)
    return WrappedLink(child, control, on_event, on_end)
