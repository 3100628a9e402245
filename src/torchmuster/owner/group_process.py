"""The head of one group on this machine, as its owner sees it: a process, and a channel to it."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from torchmuster import proc
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model.event import utc_now
from torchmuster.model.lease import OwnClock
from torchmuster.model.outcome import GroupOutcome
from torchmuster.net import listener, messages
from torchmuster.net.channel import Channel, ChannelClosedError, connect
from torchmuster.net.handshake import HandshakeError, Role
from torchmuster.owner.head_watch import HeadWatch
from torchmuster.owner.views.record import read_outcome

_POLL_S = 0.02
_LAST_WORDS_S = 2.0
_LOOK_EVERY_S = 1.0

Hear = Callable[[messages.Message], None]


class GroupProcess:
    """Starts the head of a group and follows it to its end."""

    def __init__(self, run_dir: RunDir, group: str, secret: bytes, hear: Hear) -> None:
        self._run_dir = run_dir
        self._group = group
        self._secret = secret
        self._hear = hear
        self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._channel: Channel | None = None
        self._child: proc.Child | None = None
        self._stop: messages.Stop | None = None
        # A cancelled group may bring its outputs away for long: only silence ends it.
        self._watch = HeadWatch(OwnClock(), f"group {group}", None)

    @property
    def pid(self) -> int:
        """Return the process of the head."""
        return self._child.pid if self._child is not None else 0

    def start(self, start: dict[str, Any]) -> tuple[str, int]:
        """Start the head; return where it listens."""
        folder = self._run_dir.group(self._group)
        os.makedirs(folder.path, exist_ok=True)
        atomic.write_json(folder.start, start)
        listening = listener.bind("127.0.0.1", 0)
        host, port = listening.getsockname()[:2]
        with listening:
            argv = proc.node_program("group", f"--run-dir={self._run_dir.path}")
            argv += [f"--group={self._group}", f"--listen-fd={listening.fileno()}"]
            argv += [f"--lifeline-fd={self._lifeline[0]}"]
            log = self._open_log()
            try:
                self._child = proc.start(
                    argv,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listening.fileno(), self._lifeline[0]],
                )
            finally:
                os.close(log)
        atomic.write_json(folder.head, {"host": host, "port": port}, mode=0o600)
        return str(host), int(port)

    def _open_log(self) -> int:
        path = self._run_dir.agent_log(f"group-{self._group}")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def follow(self, address: tuple[str, int]) -> GroupOutcome | None:
        """Pass on what the head says until it has ended; None when it left no result."""
        self._watch.begin()
        hearing = asyncio.create_task(self._listen(address))
        looking = asyncio.create_task(self._look_at_head())
        try:
            while not self._has_ended():
                await asyncio.sleep(_POLL_S)
            await asyncio.wait({hearing}, timeout=_LAST_WORDS_S)
        finally:
            hearing.cancel()
            looking.cancel()
            await asyncio.gather(hearing, looking, return_exceptions=True)
        return read_outcome(self._run_dir, self._group)

    async def _listen(self, address: tuple[str, int]) -> None:
        while not self._has_ended():
            try:
                channel = await connect(address[0], address[1], Role.CLIENT, self._secret)
            except (OSError, TimeoutError, HandshakeError):
                await asyncio.sleep(_POLL_S)
            else:
                await self._converse(channel)

    async def _converse(self, channel: Channel) -> None:
        self._channel = channel
        channel.send_nowait(messages.Watch(owner=True))
        if self._stop is not None:
            channel.send_nowait(self._stop)
        try:
            while True:
                message = await channel.receive()
                self._watch.hear()
                if not isinstance(message, messages.Pong):
                    self._hear(message)
        except ChannelClosedError:
            pass
        finally:
            self._channel = None
            channel.abort()

    async def _look_at_head(self) -> None:
        """Ping the head; kill it when it stands still, its agents give up their leases as well."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self._channel is not None:
                self._channel.send_nowait(messages.Ping(number=0))
            facts = proc.read_process(self.pid)
            look = self._watch.look(facts.state if facts is not None else "X")
            if look.say is not None:
                self._hear(messages.Event(name="notice", time=utc_now(), fields={"text": look.say}))
            if look.given_up is not None:
                self.kill()

    def _has_ended(self) -> bool:
        return self._child is None or self._child.poll() is not None

    def stop(self, stop: messages.Stop) -> None:
        """Ask the head to stop its group."""
        self._stop = stop
        if self._channel is not None:
            self._channel.send_nowait(stop)

    def kill(self) -> None:
        """SIGKILL the head; what it started becomes ours and is ended by `end_rest`."""
        if self._child is not None:
            self._child.send_signal(9)

    def close(self) -> None:
        """Cut the lifeline: a head that still lives ends."""
        for fd in self._lifeline:
            os.close(fd)
