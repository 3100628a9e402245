"""The commands that callers run in a pod, each on a separate authenticated channel.

(`launcher/node/exec.py`, `launcher/net/command.py`.) When the connection ends, so does the
command's input: a remote (`launcher/node/remote`) then ends what it has started.

The owner of a run names its first pod with each command. Of two first pods, the later one has the
run: sessions of the earlier one end, and its next call is answered with that news. A node that only
seemed dead may come back with its pod after an hour.
"""

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Iterator

from torchmuster.core import proc
from torchmuster.core.net.channel import Channel, ChannelClosedError
from torchmuster.kubernetes.node.order import AGAIN_CODE
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.net.command import Command
from torchmuster.launcher.node.exec import Exec, kill_sessions

CLAIM_VARIABLE = "MUSTER_FIRST_POD"  # for an owner and its children: identifies their first pod
_REPLACED_CODE = 1 << 16  # not an exit code: a later first pod has the run
RECORD_PROGRAM = "pod-record"
_LEAVE_S = 20.0  # a remote takes up to 10 s to end its agents
_LAST_WORDS_S = 30.0
_LOOK_S = 0.1
_MOST_SAID_BYTES = 64 << 20


class Sessions:
    """The commands that callers run here.

    Attributes:
        pids: The pids of the commands; a reaper of orphans must not wait for them.
        num_starting: The number of commands without a known pid yet.
    """

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.num_starting = 0
        self._execs: dict[Exec, tuple[Channel, str]] = {}
        self._claims: list[str] = []
        self._last_read = float("-inf")
        self._passed_on: int | None = None

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Count a process that is being started, whose pid is not known yet."""
        self.num_starting += 1
        try:
            yield
        finally:
            self.num_starting -= 1

    def signal(self, signum: int) -> None:
        """Send a signal to all commands, present and future; remotes pass it on to their agents."""
        self._passed_on = signum
        for pid in self.pids & {one.pid for one in self._execs}:
            proc.kill_quietly(pid, signum)

    async def ended(
        self,
        limit_s: float = float("inf"),
        *,
        calls_again_s: float = 0.0,
    ) -> None:
        """Wait until no command runs, at most so long; a client that read the record may return."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while (now := loop.time()) < deadline:
            is_busy = self._execs or self.num_starting
            if not is_busy and now - self._last_read >= calls_again_s:
                return
            await asyncio.sleep(_LOOK_S)

    async def serve(self, channel: Channel) -> None:
        """Run one caller's command until it or the connection ends."""
        try:
            start = await channel.receive()
        except ChannelClosedError:
            return
        if not isinstance(start, part_messages.ExecStart) or not start.argv:
            return
        if start.claim and not self._admit(start.claim):
            channel.send_nowait(part_messages.ExecEnded(exec_id=start.exec_id, code=_REPLACED_CODE))
            await channel.close()
            return
        reads = any(RECORD_PROGRAM in word for word in start.argv)

        def launch(streams: tuple[int, int, int]) -> proc.Child:
            stdin, stdout, stderr = streams
            return proc.start(start.argv, stdin=stdin, stdout=stdout, stderr=stderr)

        most = part_messages.MAX_WINDOW_BYTES
        one = Exec(
            start,
            channel.send_nowait,
            launch,
            _LEAVE_S,
            gets_hangup=False,
            most_bytes=most,
            patience_s=_LAST_WORDS_S,
        )
        self._execs[one] = channel, start.claim
        hearing = asyncio.create_task(_hear(channel, one))
        try:
            try:
                last = await one.run(None, self._note)
            finally:
                kill_sessions({one.pid} - {0})
                self.pids.discard(one.pid)
            if not one.is_left:
                channel.send_nowait(last)
                await _until_taken(one, hearing)
        finally:
            hearing.cancel()
            del self._execs[one]
            if reads:
                self._last_read = asyncio.get_running_loop().time()

    def _note(self, pid: int) -> None:
        self.pids.add(pid)
        if self._passed_on is not None:
            proc.kill_quietly(pid, self._passed_on)

    def _admit(self, claim: str) -> bool:
        """Say whether a first pod has the run; a new claim ends the sessions of earlier ones."""
        if claim in self._claims[:-1]:
            return False
        if claim not in self._claims:
            self._claims.append(claim)
            for channel, earlier in self._execs.values():
                if earlier and earlier != claim:
                    channel.abort()
        return True


async def _until_taken(one: Exec, hearing: "asyncio.Task[None]") -> None:
    """Wait until the caller hangs up, which it does after reading all output, or stops reading."""
    heard_at = None
    while not hearing.done() and one.heard_at != heard_at:
        heard_at = one.heard_at
        await asyncio.wait({hearing}, timeout=_LAST_WORDS_S)


async def _hear(channel: Channel, one: Exec) -> None:
    """Pass a caller's messages to its command; when the caller is gone, end the command's input."""
    with contextlib.suppress(ChannelClosedError):
        while True:
            message = await channel.receive()
            if isinstance(message, part_messages.FromExecClient):
                one.take(message)
    one.take(part_messages.ExecLeave(exec_id=one.exec_id))


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
    if code == _REPLACED_CODE:
        sys.stderr.write("muster: another first pod has this run now: this one ends\n")
        sys.stderr.flush()
        os._exit(AGAIN_CODE)
    return code
