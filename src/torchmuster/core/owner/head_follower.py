"""The connection of an owner to a head: calls it, repeats what every head has to know, pings it, ends one that is given up."""

import asyncio
from collections.abc import Awaitable, Callable

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.lease import OwnClock
from torchmuster.core.model.owner_policy import GiveUp, OwnerPolicy, Say
from torchmuster.core.net import messages
from torchmuster.core.net.address import read_secret
from torchmuster.core.net.channel import Channel, ChannelClosedError, connect
from torchmuster.core.net.handshake import HandshakeError, Role
from torchmuster.core.owner.stops import Stops

_CALL_AGAIN_S = 0.01
_LOOK_EVERY_S = 1.0
_LAST_WORDS_S = 2.0


class HeadFollower:
    """Follows one head after the other: of a run, or of a group of a workflow.

    Args:
        run_dir: Has the key of the channel.
        policy: Judges the silence of the head, and how long a stop may take.
        stops: What was asked for is the first word on every connection.
        state: Returns the state of the head's process; None where that is on another machine.
        kill: Ends a head that was given up.
        hear: Takes what the head says; says whether the conversation goes on.
        say: Tells the user.
        clock: Of the time in which this process runs.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        policy: OwnerPolicy,
        stops: Stops,
        state: Callable[[], str | None],
        kill: Callable[[], None],
        hear: Callable[[messages.Message], bool],
        say: Callable[[str], None],
        clock: OwnClock | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._policy = policy
        self._clock = clock or OwnClock()
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
        self._policy.begin(self._clock())
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
                self._policy.hear(self._clock())
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
            match self._policy.look(self._clock(), self._state()):
                case Say(text=text):
                    self._say(text)
                case GiveUp(why=why):
                    self._kill()
                    return why
