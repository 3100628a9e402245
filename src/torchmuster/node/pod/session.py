"""A session with a pod: frames of the authenticated channel, whose first byte says what they carry.

The caller sends one command, then its input; the pod sends the command's output and errors, and at last its exit code. When the
connection ends, so does the command's input: what runs there is a remote end (`node/remote`), which then ends what it has started.
"""

import asyncio
import contextlib
import os
import signal
import stat
import struct
from collections.abc import AsyncIterator, Callable, Iterator

from torchmuster.net.channel import Channel, ChannelClosedError
from torchmuster.plainfile import write_all

COMMAND, INPUT, OUTPUT, ERRORS, END = b"c", b"i", b"o", b"e", b"x"
RECORD_PROGRAM = "pod-record"
PIECE_BYTES = 256 << 10
_MAX_COMMAND_BYTES = 64 << 10
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
        self._children: set[asyncio.subprocess.Process] = set()
        self._last_read = float("-inf")

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Note that a process is being started whose pid is not known yet."""
        self.num_starting += 1
        try:
            yield
        finally:
            self.num_starting -= 1

    def signal(self, signum: int) -> None:
        """Send a signal to the commands: remote ends pass it on to their agents."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signum)

    async def ended(self, limit_s: float = float("inf"), *, calls_again_s: float = 0.0) -> None:
        """Wait until no command runs, at most so long; a client who has just read the record may call again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while (now := loop.time()) < deadline:
            if not self._children and now - self._last_read >= calls_again_s:
                return
            await asyncio.sleep(_LOOK_S)

    async def serve(self, channel: Channel) -> None:
        """Run the command of one caller, to its end or that of the connection."""
        try:
            frame = await channel.receive_bytes()
        except ChannelClosedError:
            return
        if frame[:1] != COMMAND or len(frame) > _MAX_COMMAND_BYTES:
            return
        reads = RECORD_PROGRAM.encode() in frame
        child = await self._start(os.fsdecode(frame[1:]))
        try:
            await _attend(channel, child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
            self.pids.discard(child.pid)
            self._children.discard(child)
            if reads:
                self._last_read = asyncio.get_running_loop().time()

    async def _start(self, command: str) -> asyncio.subprocess.Process:
        with self.starting():
            child = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            self.pids.add(child.pid)
            self._children.add(child)
        return child


async def _attend(channel: Channel, child: asyncio.subprocess.Process) -> None:
    """Carry bytes both ways until the command has ended, or the caller is gone and it has had its time to end."""
    if child.stdin is None or child.stdout is None or child.stderr is None:
        raise ValueError("the command has no pipes")
    hearing = asyncio.create_task(_hear(channel, child.stdin))
    telling = {
        asyncio.create_task(_tell(channel, OUTPUT, child.stdout)),
        asyncio.create_task(_tell(channel, ERRORS, child.stderr)),
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
    await channel.send_bytes(COMMAND + os.fsencode(command))
    sending = asyncio.create_task(_send_input(channel, streams[0]))
    try:
        while True:
            frame = await channel.receive_bytes()
            if frame[:1] == END:
                (code,) = _CODE.unpack(frame[1:])
                return int(code)
            fd = streams[1 if frame[:1] == OUTPUT else 2]
            await asyncio.to_thread(write, fd, frame[1:])
    except struct.error as error:
        raise ChannelClosedError("the end of the command can't be read") from error
    finally:
        sending.cancel()


async def ask_session(channel: Channel, command: str, data: bytes = b"") -> tuple[int, bytes]:
    """Run a command at the other end with this input; return its exit code and its output.

    Raises:
        ChannelClosedError: The connection has ended before the command.
        OSError: The same.
    """
    await channel.send_bytes(COMMAND + os.fsencode(command))
    for begin in range(0, len(data), PIECE_BYTES):
        await channel.send_bytes(INPUT + data[begin : begin + PIECE_BYTES])
    await channel.send_bytes(INPUT)
    said = bytearray()
    while (frame := await channel.receive_bytes())[:1] != END:
        said += frame[1:] if frame[:1] == OUTPUT else b""
    (code,) = _CODE.unpack(frame[1:].ljust(_CODE.size, b"\xff")[: _CODE.size])
    return int(code), bytes(said)


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
