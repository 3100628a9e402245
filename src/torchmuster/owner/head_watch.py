"""Whether the head still answers its owner, and what follows when it does not: pure, the clock is an argument.

The owner asks once a second. Its own pauses (Ctrl-Z, a laptop's sleep) are no silence of the head.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from torchmuster.files.layout import RunDir
from torchmuster.model.liveness.lease import SILENT_S, OwnClock, is_given_up
from torchmuster.net import messages
from torchmuster.net.channel import Channel, ChannelClosedError, connect
from torchmuster.net.handshake import HandshakeError, Role
from torchmuster.net.secret import read_secret
from torchmuster.owner.stops import Stops

SAY_EVERY_S = 5.0
FIRST_WORD_S = 30.0  # a head that starts beside many others takes its time
FAR_SILENT_S = 20.0  # as long as an ssh connection may stall
_STOPPED_SILENT_S = 5.0
_SECOND_STOP_S = 3.0
_STOP_MARGIN_S = 30.0  # for the ends of workers, and the lease of a node that was lost meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLook:
    """What one look at the head has shown.

    Attributes:
        say: A sentence for the user.
        given_up: Why the head is ended now.
    """

    say: str | None = None
    given_up: str | None = None


class HeadWatch:
    """Counts the silence of one head after the other, and the stops that were asked for."""

    def __init__(self, clock: OwnClock, node: str, grace_s: float | None) -> None:
        self._clock = clock
        self._node = node
        self._grace_s = grace_s
        self._stops: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Count from now on: a head has been started."""
        self._heard_at = self._clock()
        self._has_spoken = False
        self._say_at = self._heard_at + SAY_EVERY_S

    def hear(self) -> None:
        """Note that the head has said something."""
        self._heard_at = self._clock()
        self._has_spoken = True
        self._say_at = self._heard_at + SAY_EVERY_S

    def stop(self) -> None:
        """Note that somebody has asked to stop."""
        self._stops.append(self._clock())

    def look(self, state: str | None) -> HeadLook:
        """Say what follows now; `state` is that of the head's process, None where it is on another machine."""
        now = self._clock()
        silent_s = now - self._heard_at
        limit_s = self._limit_s(state)
        if is_given_up(silent_s, limit_s, state):
            return HeadLook(given_up=f"it was silent for {silent_s:.0f} s and was killed")
        if self._stop_takes_too_long(now):
            return HeadLook(
                given_up="it did not end in time when it was asked to stop, and was killed"
            )
        if now < self._say_at:
            return HeadLook()
        self._say_at = now + SAY_EVERY_S
        return HeadLook(
            say=f"the head of {self._node} has been silent for {silent_s:.0f} s;"
            f" {self._what_follows(state, limit_s)}"
        )

    def _limit_s(self, state: str | None) -> float:
        if self._stops and state is not None:
            return _STOPPED_SILENT_S
        if not self._has_spoken:
            return FIRST_WORD_S
        return FAR_SILENT_S if state is None else SILENT_S

    def _what_follows(self, state: str | None, limit_s: float) -> str:
        if state is not None and not is_given_up(limit_s + 1.0, limit_s, state):
            return "its process runs, so muster waits for it"
        return f"after {limit_s:.0f} s it counts as lost"

    def _stop_takes_too_long(self, now: float) -> bool:
        if len(self._stops) > 1:
            is_silent = now - self._heard_at > _STOPPED_SILENT_S
            return len(self._stops) > 2 or is_silent or now - self._stops[1] > _SECOND_STOP_S
        if not self._stops or self._grace_s is None:
            return False
        return now - self._stops[0] > self._grace_s + _STOP_MARGIN_S


# The connection of an owner to a head: calls it, repeats what every head has to know, pings it, ends one that is silent.


_CALL_AGAIN_S = 0.01
_LOOK_EVERY_S = 1.0
_LAST_WORDS_S = 2.0


class HeadFollower:
    """Follows one head after the other: of a run, or of a group of a workflow.

    Args:
        run_dir: Has the key of the channel.
        watch: Judges the silence of the head, and how long a stop may take.
        stops: What was asked for is the first word on every connection.
        state: Returns the state of the head's process; None where that is on another machine.
        kill: Ends a head that was given up.
        hear: Takes what the head says; says whether the conversation goes on.
        say: Tells the user.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        watch: HeadWatch,
        stops: Stops,
        state: Callable[[], str | None],
        kill: Callable[[], None],
        hear: Callable[[messages.Message], bool],
        say: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._watch = watch
        self._stops = stops
        self._state = state
        self._kill = kill
        self._hear = hear
        self._say = say
        self._channel: Channel | None = None
        self._repeated: list[messages.Message] = []
        self._num_told = 0  # of these, to the head that is followed now

    @property
    def unsent_bytes(self) -> int:
        """Return how much the head has not taken yet."""
        return self._channel.unsent_bytes if self._channel is not None else 0

    def send(self, message: messages.Message) -> None:
        """Send, if the connection stands."""
        if self._channel is not None:
            self._channel.send_nowait(message)

    def repeat(self, message: messages.Message) -> None:
        """Tell the head, as soon as the connection stands, and each one that takes its place."""
        self._repeated.append(message)
        self.send(message)

    def send_stop(self) -> None:
        """Ask the head to stop; a connection that comes later begins with it."""
        stop = self._stops.message()
        if stop is not None:
            self.send(stop)

    async def follow(
        self, address: tuple[str, int], ended: Callable[[], Awaitable[str]]
    ) -> str | None:
        """Follow a head that was just started to its end.

        Args:
            address: Where it listens.
            ended: Waits for the end of its process; returns how it ended.

        Returns:
            How it ended, or why it was killed; None when `hear` has ended the conversation.

        Raises:
            MusterError: The key can't be read.
        """
        secret = read_secret(self._run_dir.secret)
        self._num_told = 0
        self._watch.begin()
        ending = asyncio.ensure_future(ended())
        talking = asyncio.create_task(self._talk(address, secret, ending))
        looking = asyncio.create_task(self._look())
        tasks = (talking, looking, ending)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ending in done:  # what the head said last may still be on its way to us
                await asyncio.wait({talking}, timeout=_LAST_WORDS_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        results = [task.result() for task in tasks if not task.cancelled()]
        return next((how for how in results if how is not None), None)

    async def _talk(
        self, address: tuple[str, int], secret: bytes, ending: "asyncio.Future[str]"
    ) -> None:
        """Take what the head says; call again when the connection ends and the head does not."""
        goes_on = True
        while goes_on and not ending.done():
            try:
                channel = await connect(*address, Role.CLIENT, secret)
            except (OSError, TimeoutError, HandshakeError):
                await asyncio.sleep(_CALL_AGAIN_S)  # `_look` and `ending` set the limit
                continue
            goes_on = await self._converse(channel)

    async def _converse(self, channel: Channel) -> bool:
        self._channel = channel
        self.send(messages.Watch(owner=True))
        self.send_stop()
        for message in self._repeated[self._num_told :]:
            self.send(message)
        try:
            while True:
                message = await channel.receive()
                self._watch.hear()
                if not isinstance(message, messages.Pong) and not self._hear(message):
                    return False
        except ChannelClosedError:
            self._num_told = len(self._repeated)
            return True
        finally:
            self._channel = None
            channel.abort()

    async def _look(self) -> str:
        """Ping the head; kill it when it stands still, or does not end when it is asked to."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.send(messages.Ping(number=0))
            look = self._watch.look(self._state())
            if look.say is not None:
                self._say(look.say)
            if look.given_up is not None:
                self._kill()
                return look.given_up
