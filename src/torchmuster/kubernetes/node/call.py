"""Opens a session with a pod, with ssh's command line as `launcher/engines/ssh_host.py` types it.

It ends with its input, and so with the process that started it. (PR_SET_PDEATHSIG would end it with
the starting thread.) The exit code is the command's; it is 255 without a session, with one line on
standard error. A pod that is being created has no name and no pod server yet, so callers inside
a process may retry. Each try resolves the name again: a replacement pod has another address.
"""

import asyncio
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NoReturn

from torchmuster.core import proc
from torchmuster.core.model.codec import from_arguments, to_arguments
from torchmuster.core.net.address import read_secret
from torchmuster.core.net.channel import Channel, ChannelClosedError, HandshakeError, Role, connect
from torchmuster.core.plainfile import write_all
from torchmuster.core.proc import CommandOutput
from torchmuster.kubernetes.node.order import AGAIN_CODE, CLAIM_VARIABLE, REPLACED_CODE, PodOrder
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.net.command import GONE, Command, CommandProcess

_NO_SESSION = 255
_TRY_EVERY_S = 0.5
_MOST_SAID_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """The command line of `call`: the key's file, the pod server's port, and ssh's arguments.

    `command` follows `--`. Only its last two words count, the host and the command; the others are
    options of ssh.
    """

    key: str
    port: int
    command: tuple[str, ...]


def call_argv(key: str, port: int) -> list[str]:
    """Return the command that replaces `ssh`, with the key's file and the port of a run's pods."""
    return proc.node_program("call", *to_arguments(CallArguments(key=key, port=port, command=())))


def main(arguments: list[str]) -> int:
    """Run a command in a pod."""
    words = from_arguments(CallArguments, arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    secret, (host, command) = read_secret(words.key), words.command[-2:]
    far = part_messages.MAX_WINDOW_BYTES  # a client may be a continent away
    return asyncio.run(call_pod(host, words.port, secret, command, 0.0, window_bytes=far))


async def call_pod(
    host: str,
    port: int,
    secret: bytes,
    command: str,
    wait_s: float,
    streams: tuple[int, int, int] = (0, 1, 2),
    window_bytes: int = part_messages.EXEC_WINDOW_BYTES,
) -> int:
    """Run a command in a pod with these as its standard input, output and errors.

    Return its exit code, or 255 if no session could be opened within `wait_s`, with one line on
    standard error.
    """
    try:
        channel = await connect_with_retry(host, port, secret, wait_s)
    except (OSError, HandshakeError) as error:
        write_all(streams[2], f"{host} port {port}: {words_of(error)}\n".encode())
        return _NO_SESSION
    try:
        return await call_session(channel, command, streams, window_bytes)
    except (ChannelClosedError, OSError) as error:
        write_all(streams[2], f"{host}: the connection ended: {words_of(error)}\n".encode())
        return _NO_SESSION
    finally:
        channel.abort()


def _start_of(command: str, window_bytes: int) -> part_messages.ExecStart:
    return part_messages.ExecStart(
        exec_id=secrets.token_hex(8),
        task="",
        argv=("/bin/sh", "-c", command),
        claim=os.environ.get(CLAIM_VARIABLE, ""),
        window_bytes=window_bytes,
    )


async def call_session(
    channel: Channel,
    command: str,
    streams: tuple[int, int, int] = (0, 1, 2),
    window_bytes: int = part_messages.EXEC_WINDOW_BYTES,
) -> int:
    """Run a command at the other end on these standard streams; return its exit code.

    Raises:
        ChannelClosedError: The connection ended before the command, or the command was not started.
    """
    one = Command(_start_of(command, window_bytes), channel.send_nowait, streams)
    one.begin()
    listening = asyncio.create_task(one.listen(channel))
    try:
        code = await asyncio.shield(one.ended)
    finally:
        listening.cancel()
        one.leave()
    if one.refusal is not None:
        raise ChannelClosedError(f"{one.refusal.what}: {one.refusal.why}")
    if one.lost is not None:
        raise ChannelClosedError(one.lost)
    return _code_of(code)


async def ask_session(channel: Channel, command: str, data: bytes = b"") -> tuple[int, bytes]:
    """Run a command at the other end with this input (at most 4 MiB); return exit code and output.

    Raises:
        ChannelClosedError: The connection ended before the command, or the command was not started.
    """
    start, said = _start_of(command, part_messages.MAX_WINDOW_BYTES), bytearray()
    channel.send_nowait(start)
    for begin in range(0, len(data), part_messages.EXEC_CHUNK_BYTES):
        piece = data[begin : begin + part_messages.EXEC_CHUNK_BYTES]
        channel.send_nowait(part_messages.ExecInput(exec_id=start.exec_id, data=piece))
    channel.send_nowait(part_messages.ExecInput(exec_id=start.exec_id, end=True))
    while True:
        match await channel.receive():
            case part_messages.ExecOutput(stream=stream, data=piece):
                said += piece if stream == 1 else b""
                if len(said) > _MOST_SAID_BYTES:
                    raise ChannelClosedError("the command says too much")
                size_bytes = len(piece)
                channel.send_nowait(
                    part_messages.ExecAcknowledged(exec_id=start.exec_id, size_bytes=size_bytes)
                )
            case part_messages.ExecEnded(code=code):
                return _code_of(code), bytes(said)
            case part_messages.ExecRefused(what=what, why=why):
                raise ChannelClosedError(f"{what}: {why}")


def _code_of(code: int) -> int:
    """Return a command's exit code; exit at once if this owner has been replaced."""
    if code == REPLACED_CODE:
        end_replaced()
    return code


def end_replaced() -> NoReturn:
    """End this process, the owner in a first pod that another one has replaced."""
    sys.stderr.write("muster: another first pod has this run now: this one ends\n")
    sys.stderr.flush()
    os._exit(AGAIN_CODE)


async def connect_with_retry(host: str, port: int, secret: bytes, wait_s: float) -> Channel:
    """Return a session with a pod; retry for `wait_s`.

    Raises:
        OSError: The pod has no name or no pod server, or does not answer.
        HandshakeError: Something else answers.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        try:
            return await connect(host, port, Role.SESSION, secret)
        except (OSError, HandshakeError):
            # A wrong secret may be that of a leaving pod which had this name before.
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_TRY_EVERY_S)


def words_of(error: Exception) -> str:
    """Say why a call failed."""
    if isinstance(error, socket.gaierror):
        return "its name is not known"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number is not None else str(error)  # asyncio has its own messages


# Sessions with many pods in one process: one thread carries all their streams.
#
# A process for each would cost its start-up time and 20 MB of the first pod's memory, more than a
# gigabyte with 64 pods.


_MOST_THREADS = 256  # for name look-ups: an unanswered one must not block others


@dataclass(slots=True)
class PodConnections:
    """The sessions of one process with the pods of a run.

    Attributes:
        domain: The suffix that makes a pod's name resolvable: the Service's name; empty if names
            have it.
        wait_s: How long to retry a pod.
    """

    secret: bytes
    port: int
    domain: str
    wait_s: float
    _loop: asyncio.AbstractEventLoop | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, argv: Sequence[str], stdin: int, stdout: int, stderr: int) -> CommandProcess:
        """Start a session; the last two words are host and command. Duplicates the descriptors."""
        host, command = argv[-2:]
        name = f"{host}.{self.domain}" if self.domain else host
        streams = (os.dup(stdin), os.dup(stdout), os.dup(stderr))
        calling = call_pod(name, self.port, self.secret, command, self.wait_s, streams)
        return CommandProcess(self._running_loop(), calling, streams)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS, "line"))
                threading.Thread(target=self._loop.run_forever, name="lines", daemon=True).start()
            return self._loop


def connections_of(order: PodOrder, key: str) -> PodConnections:
    """Return sessions with the pods of an order, by their full names, which are not retried."""
    return PodConnections(secret=read_secret(key), port=order.port, domain="", wait_s=0.0)


def ask_pod(
    host: str, port: int, secret: bytes, command: str, limit_s: float, data: bytes = b""
) -> CommandOutput:
    """Run a command in a pod, from a thread without an event loop; the status is None if late."""

    async def ask() -> CommandOutput:
        async with asyncio.timeout(limit_s):
            channel = await connect_with_retry(host, port, secret, 0.0)
            try:
                status, said = await ask_session(channel, command, data)
            finally:
                channel.abort()
        return CommandOutput(status=status, stdout=said, stderr=b"")

    try:
        return asyncio.run(ask())
    except TimeoutError:
        return CommandOutput(status=None, stdout=b"", stderr=b"")
    except (OSError, HandshakeError, ChannelClosedError) as error:
        return CommandOutput(status=GONE, stdout=b"", stderr=words_of(error).encode())
