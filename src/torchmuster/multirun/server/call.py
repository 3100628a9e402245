"""Call the server of this node: find its socket, check that it is ours, ask for an agent."""

import contextlib
import json
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec, contract
from torchmuster.core.model.codec import decode
from torchmuster.errors import ChannelError, MusterError, SessionBusyError
from torchmuster.multirun.server import messages

SESSION_FILE = "session.json"
_CALL_S = 5.0
_OPEN_S = 20.0  # torch is imported before a server opens again
_START_S = 120.0
_LOOK_S = 0.05


def server_file(run_dir: RunDir, place: int) -> str:
    """Return the path of the file that says where a server listens."""
    return os.path.join(run_dir.path, "doors", f"{place}.json")


def read_setup(run_dir: RunDir) -> messages.SessionSetup:
    """Return the setup that a session was started with.

    Raises:
        ChannelError: The session's file can't be read.
    """
    plain = atomic.read_json(os.path.join(run_dir.path, SESSION_FILE))
    try:
        return codec.from_plain(messages.SessionSetup, plain)
    except codec.CodecError as error:
        where = os.path.join(run_dir.path, SESSION_FILE)
        raise ChannelError(
            "the session's file can't be read", where=where, why=str(error)
        ) from error


def own_setup(run_dir: RunDir) -> messages.SessionSetup:
    """Return the session's setup, for its server on this node.

    It comes from the environment if it is there, because not every node sees the client's files.

    Raises:
        ChannelError: The session's file can't be read.
    """
    text = os.environ.get(contract.SESSION_VARIABLE)
    if text is None:
        return read_setup(run_dir)
    setup = codec.from_plain(messages.SessionSetup, json.loads(text))
    # The session has brought the user's own modules here only if it is to import some.
    own = os.getcwd() if setup.preload else run_dir.path
    return replace(setup, folder=setup.folder or own)


def this_process() -> messages.ClientProcess:
    """Return this process as the client that a session ends with."""
    facts = proc.read_process(os.getpid())
    ticks = facts.start_ticks if facts is not None else 0
    machine = (proc.boot_id(), proc.network_id())
    return messages.ClientProcess(pid=os.getpid(), start_ticks=ticks, machine=machine)


def client_lives(setup: messages.SessionSetup) -> bool | None:
    """Return whether the session's client still runs; None: it has none, or on another machine."""
    client = setup.client
    state = proc.process_state_here(client.pid, client.machine) if client is not None else None
    if client is None or state is None:
        return None
    facts = proc.read_process(client.pid)
    return facts is not None and facts.start_ticks == client.start_ticks and facts.can_run


def peer_uid(line: socket.socket) -> int:
    """Return the user id of the process at the other end, from the kernel."""
    data = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(data[4:8], "little")


def connect_to_server(run_dir: RunDir, place: int) -> socket.socket:
    """Return a connection to the server of a node.

    Raises:
        ChannelError: The server is not there, is on another machine, or is accessible to others.
    """
    path = server_file(run_dir, place)
    plain = atomic.read_json(path)
    if plain is None:
        raise ChannelError(f"node {place} of the session has no server", where=path)
    try:
        address = codec.from_plain(messages.ServerAddress, plain)
    except codec.CodecError as error:
        raise ChannelError("what says where the server is can't be read", where=path) from error
    if tuple(address.machine) != (proc.boot_id(), proc.network_id()):
        raise ChannelError(
            "the session is on another machine, or on this one before it was started again",
            where=path,
            fix="use it there, or start one here: muster session start",
        )
    _check_owner(os.path.dirname(address.socket))
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(_CALL_S)
    try:
        line.connect(address.socket)
    except OSError as error:
        line.close()
        why = "the process of this server has gone" if not proc.is_running(address.pid) else None
        raise ChannelError(
            f"the session's server on node {place} does not answer",
            where=address.socket,
            why=why or error.strerror or str(error),
        ) from error
    if peer_uid(line) != os.getuid():
        line.close()
        raise ChannelError("another user answers at the server's socket", where=address.socket)
    return line


def _check_owner(folder: str) -> None:
    """Refuse a folder that belongs to another user or is accessible to others."""
    try:
        status = os.lstat(folder)
    except OSError as error:
        raise ChannelError(
            "the server's socket has gone", where=folder, why=error.strerror
        ) from error
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise ChannelError(
            "the server's folder is not only ours",
            where=folder,
            why=f"it belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}",
            fix="muster session end, then start a new one",
        )


def ask(run_dir: RunDir, place: int, order: messages.SessionOrder) -> messages.SessionAnswer:
    """Send an order to a server and return its answer.

    Raises:
        ChannelError: The server can't be reached, or does not answer.
    """
    with connect_to_server(run_dir, place) as line:
        send_order(line, order)
        try:
            packet = line.recv(messages.MAX_PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:
            raise ChannelError(f"the session's server on node {place} does not answer")
        return decode(packet, messages.SessionAnswer)


def send_order(line: socket.socket, order: messages.SessionOrder, fds: Sequence[int] = ()) -> None:
    """Send an order with descriptors, which stay open in this process.

    Raises:
        ChannelError: The server has ended since the connection was made.
    """
    memory = messages.pack_order(order)
    try:
        socket.send_fds(line, [b"order"], [memory, *fds])
    except OSError as error:
        why = error.strerror or str(error)
        raise ChannelError("the session's server does not answer", why=why) from error
    finally:
        os.close(memory)


class SessionAgent:
    """An agent that a server forks for us; the server reports its end, because it is the parent."""

    def __init__(self, line: socket.socket | None, session: str, why_dead: str = "") -> None:
        self.pid = 0
        self.session = session
        self.said: tuple[str, ...] = (why_dead,) if why_dead else ()
        self.is_warm = False
        self.on_renewal: Callable[[str], None] = lambda _: None
        self._line = line
        self._pidfd: int | None = None
        self._status: int | None = None if line is not None else 1
        self._refusal: MusterError | None = None
        if line is not None:
            line.setblocking(False)

    def wait_started(self) -> None:
        """Wait until the agent runs.

        Raises:
            UsageError: Another run is in the session.
            ChannelError: The server has gone, or can't start the agent.
        """
        deadline = time.monotonic() + _START_S
        while not self.pid and self._status is None and time.monotonic() < deadline:
            self.wait(1.0)
        if self._refusal is not None:
            raise self._refusal
        if not self.pid:
            raise ChannelError(
                f"the session {self.session} has ended, or one of its nodes",
                why=" ".join(self.said) or "its server has closed the connection",
                fix=f"muster session list; muster session start --name {self.session}",
            )

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), or None while the process runs."""
        while self._status is None and self._line is not None:
            try:
                packet, fds, _, _ = socket.recv_fds(self._line, messages.MAX_PACKET_BYTES, 1)
            except BlockingIOError:
                return None
            except OSError:
                packet, fds = b"", []
            if not packet:
                self._end(-int(signal.SIGKILL))  # it dies with its server
            else:
                self._take(decode(packet, messages.SessionAnswer), fds)
        return self._status

    def _take(self, answer: messages.SessionAnswer, fds: list[int]) -> None:
        match answer:
            case messages.AgentForked(pid=pid, is_warm=is_warm):
                self.pid, self.is_warm = pid, is_warm
                self._pidfd = fds[0] if fds else None
            case messages.ForkedEnded(status=status):
                self._end(status)
            case messages.TemplateRenewed(why=why):
                self.on_renewal(why)
            case messages.SessionBusy(run_id=run_id):
                self._refusal = SessionBusyError(self.session, run_id)
                self._end(1)
            case messages.ForkRefused(why=why):
                self._refusal = ChannelError(
                    f"the session {self.session} can't start the run", why=why
                )
                self._end(1)

    def _end(self, status: int) -> None:
        self._status = status
        if self._line is not None:
            self._line.close()
            self._line = None

    def let_go(self) -> None:
        """Stop waiting, because its owner has gone; the server ends the agent."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)  # wakes a waiting thread

    def wait(self, timeout_s: float) -> int | None:
        """Wait for an answer; return the exit status, or None while the agent runs."""
        if self._line is not None and self._status is None:
            select.select([self._line], [], [], timeout_s)
        return self.poll()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the agent, through its pidfd; do nothing if it has ended."""
        if self._pidfd is not None and self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)


def wait_for_server(run_dir: RunDir, place: int, lives: Callable[[], bool]) -> socket.socket:
    """Return a connection to a server that is opening, or opening again after a failure.

    Raises:
        ChannelError: The session has ended, or the server has not opened in time.
    """
    deadline = time.monotonic() + _OPEN_S
    while True:
        try:
            return connect_to_server(run_dir, place)
        except ChannelError:
            if time.monotonic() > deadline or not lives():
                raise
        select.select([], [], [], _LOOK_S)
