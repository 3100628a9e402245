"""A session with a pod: frames of the authenticated channel, whose first byte says what they carry.

The caller sends one command, then its input; the pod sends the command's output and errors, and at last its exit code. When the
connection ends, so does the command's input: what runs there is a remote end (`node/remote`), which then ends what it has started.

The owner of a run says before its commands which first pod it is in. Of two, the one that came later has the run: sessions of the
other end, and it is told so when it calls again. A node that only seemed dead may come back with its pod after an hour.
"""

import asyncio
import contextlib
import os
import signal
import stat
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator

from torchmuster.net.channel import Channel, ChannelClosedError
from torchmuster.node.pod.order import AGAIN_CODE
from torchmuster.plainfile import write_all

COMMAND, INPUT, OUTPUT, ERRORS, END, CLAIM = b"c", b"i", b"o", b"e", b"x", b"k"
CLAIM_VARIABLE = "MUSTER_FIRST_POD"  # of an owner and what it starts: which first pod it is in
_REPLACED_CODE = 1 << 16  # of no command: a later first pod has the run
RECORD_PROGRAM = "pod-record"
PIECE_BYTES = 256 << 10
_MAX_COMMAND_BYTES = 64 << 10
_MAX_CLAIM_BYTES = 64
_CODE = struct.Struct("!i")
_LEAVE_S = 20.0  # a remote end takes up to 10 s to end its agents
_LAST_WORDS_S = 5.0
_LOOK_S = 0.1
Write = Callable[[int, bytes], object]


class Sessions:
    """The commands that callers run here.

    Attributes:
        pids: Of the commands; whoever waits for other processes leaves them alone.
        num_starting: Of these the pids are not known yet.
    """

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.num_starting = 0
        self._children: dict[_Child, tuple[Channel, bytes]] = {}
        self._claims: list[bytes] = []
        self._last_read = float("-inf")
        self._passed_on: int | None = None

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Note that a process is being started whose pid is not known yet."""
        self.num_starting += 1
        try:
            yield
        finally:
            self.num_starting -= 1

    def signal(self, signum: int) -> None:
        """Send a signal to the commands, and to those that begin later: remote ends pass it on to their agents."""
        self._passed_on = signum
        for child in self._children:
            child.send_signal(signum)

    async def ended(
        self,
        limit_s: float = float("inf"),
        *,
        calls_again_s: float = 0.0,
    ) -> None:
        """Wait until no command runs, at most so long; a client who has just read the record may call again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while (now := loop.time()) < deadline:
            is_busy = self._children or self.num_starting
            if not is_busy and now - self._last_read >= calls_again_s:
                return
            await asyncio.sleep(_LOOK_S)

    async def serve(self, channel: Channel) -> None:
        """Run the command of one caller, to its end or that of the connection."""
        try:
            frame = await channel.receive_bytes()
        except ChannelClosedError:
            return
        claim = b""
        if frame[:1] == CLAIM:
            claim = frame[1 : 1 + _MAX_CLAIM_BYTES]
            if not self._admit(claim):
                with contextlib.suppress(OSError):
                    await channel.send_bytes(END + _CODE.pack(_REPLACED_CODE))
                return
            try:
                frame = await channel.receive_bytes()
            except ChannelClosedError:
                return
        if frame[:1] != COMMAND or len(frame) > _MAX_COMMAND_BYTES:
            return
        reads = RECORD_PROGRAM.encode() in frame
        child = await self._start(os.fsdecode(frame[1:]))
        self._children[child] = channel, claim
        if claim in self._claims[:-1]:  # while it started
            channel.abort()
        try:
            await _attend(channel, child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
            child.close()
            self.pids.discard(child.pid)
            del self._children[child]
            if reads:
                self._last_read = asyncio.get_running_loop().time()

    def _admit(self, claim: bytes) -> bool:
        """Say whether a first pod has the run, or has it from now on: then sessions of the one before end."""
        if claim in self._claims[:-1]:
            return False
        if claim not in self._claims:
            self._claims.append(claim)
            for channel, earlier in self._children.values():
                if earlier and earlier != claim:
                    channel.abort()
        return True

    async def _start(self, command: str) -> "_Child":
        with self.starting():
            child = await _Child.start(command)
            self.pids.add(child.pid)
        if self._passed_on is not None:
            child.send_signal(self._passed_on)
        return child


class _Streams(asyncio.subprocess.SubprocessStreamProtocol):
    """The pipes of a command, and its end."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self) -> None:
        super().__init__(PIECE_BYTES, asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class _Child:
    """A command that runs here.

    The `wait` of asyncio's own class also waits for all who hold the pipes.

    Attributes:
        pid: Of the command, and of its process group.
        streams: Its pipes.
    """

    def __init__(self, transport: asyncio.SubprocessTransport, streams: _Streams) -> None:
        self.pid = transport.get_pid()
        self.streams = streams
        self._transport = transport

    @classmethod
    async def start(cls, command: str) -> "_Child":
        """Start a command of a shell."""
        loop = asyncio.get_running_loop()
        argv = ("/bin/sh", "-c", command)
        return cls(*await loop.subprocess_exec(_Streams, *argv, start_new_session=True))

    def send_signal(self, signum: int) -> None:
        """Send it a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.send_signal(signum)

    async def wait(self) -> int:
        """Wait for its end, whoever else has its pipes; return its exit code."""
        await self.streams.exited.wait()
        return self._transport.get_returncode() or 0

    def close(self) -> None:
        """Let its pipes go."""
        self._transport.close()


async def _attend(channel: Channel, child: _Child) -> None:
    """Carry bytes both ways until the command has ended, or the caller is gone and it has had its time to end."""
    hearing = asyncio.create_task(_hear(channel, child.streams.stdin))
    telling = {
        asyncio.create_task(_tell(channel, OUTPUT, child.streams.stdout)),
        asyncio.create_task(_tell(channel, ERRORS, child.streams.stderr)),
    }
    ending = asyncio.create_task(child.wait())
    try:
        await asyncio.wait({hearing, ending}, return_when=asyncio.FIRST_COMPLETED)
        if hearing.done():
            await asyncio.wait({ending}, timeout=_LEAVE_S)
            return
        # What it has started may hold the pipes.
        await asyncio.wait(telling, timeout=_LAST_WORDS_S)
        with contextlib.suppress(OSError):
            await channel.send_bytes(END + _CODE.pack(ending.result()))
    finally:
        for task in (hearing, *telling, ending):
            task.cancel()


async def _hear(channel: Channel, stdin: asyncio.StreamWriter) -> None:
    """Give the command its input; return when the caller is gone, which ends it too."""
    try:
        while True:
            data = (await channel.receive_bytes())[1:]
            if not data:
                stdin.close()
            elif not stdin.is_closing():
                stdin.write(data)
                with contextlib.suppress(OSError):  # it reads no more
                    await stdin.drain()
    except ChannelClosedError:
        stdin.close()


async def _tell(channel: Channel, kind: bytes, stream: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while data := await stream.read(PIECE_BYTES):
            await channel.send_bytes(kind + data)


async def call_session(
    channel: Channel,
    command: str,
    streams: tuple[int, int, int] = (0, 1, 2),
    write: Write = write_all,
) -> int:
    """Run a command at the other end with these as its standard input, output and errors; return its exit code.

    `write` is called in other threads, and may be at it when this is cancelled.

    Raises:
        ChannelClosedError: The connection has ended before the command.
    """
    await _send_command(channel, command)
    sending = asyncio.create_task(_send_input(channel, streams[0]))
    try:
        while True:
            frame = await channel.receive_bytes()
            if frame[:1] == END:
                return _code_of(frame)
            fd = streams[1 if frame[:1] == OUTPUT else 2]
            await asyncio.to_thread(write, fd, frame[1:])
    finally:
        sending.cancel()


async def ask_session(channel: Channel, command: str, data: bytes = b"") -> tuple[int, bytes]:
    """Run a command at the other end with this input; return its exit code and its output.

    Raises:
        ChannelClosedError: The connection has ended before the command.
        OSError: The same.
    """
    await _send_command(channel, command)
    for begin in range(0, len(data), PIECE_BYTES):
        await channel.send_bytes(INPUT + data[begin : begin + PIECE_BYTES])
    await channel.send_bytes(INPUT)
    said = bytearray()
    while (frame := await channel.receive_bytes())[:1] != END:
        said += frame[1:] if frame[:1] == OUTPUT else b""
    return _code_of(frame), bytes(said)


def _code_of(frame: bytes) -> int:
    """Return the exit code of a command; an owner that another one has replaced ends here, and writes nothing more.

    Raises:
        ChannelClosedError: The frame has none.
    """
    try:
        (code,) = _CODE.unpack(frame[1:])
    except struct.error as error:
        raise ChannelClosedError("the end of the command can't be read") from error
    if code == _REPLACED_CODE:
        sys.stderr.write("muster: another first pod has this run now: this one ends\n")
        sys.stderr.flush()
        os._exit(AGAIN_CODE)
    return int(code)


async def _send_command(channel: Channel, command: str) -> None:
    if (claim := os.environ.get(CLAIM_VARIABLE)) is not None:
        await channel.send_bytes(CLAIM + claim.encode())
    await channel.send_bytes(COMMAND + os.fsencode(command))


async def _send_input(channel: Channel, fd: int) -> None:
    with contextlib.suppress(OSError):
        async for data in _input(fd):
            await channel.send_bytes(INPUT + data)
        await channel.send_bytes(INPUT)


async def _input(fd: int) -> AsyncIterator[bytes]:
    """Yield what can be read: of a pipe, a socket, or a plain file, which can't be waited for."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        while data := await asyncio.to_thread(os.read, fd, PIECE_BYTES):
            yield data
        return
    reader = asyncio.StreamReader(limit=PIECE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(fd))
    )
    try:
        while data := await reader.read(PIECE_BYTES):
            yield data
    finally:
        transport.close()
