"""An owner's connection to a head: reconnect, repeat standing orders, ping, kill a lost head."""

import asyncio
from collections.abc import Awaitable, Callable

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.lease import OwnClock
from torchmuster.core.model.owner_policy import GiveUp, OwnerPolicy, Say
from torchmuster.core.net import messages
from torchmuster.core.net.address import read_secret
from torchmuster.core.net.channel import Channel, ChannelClosedError, HandshakeError, Role, connect
from torchmuster.core.owner.stops import Stops

_CALL_AGAIN_S = 0.01
_LOOK_EVERY_S = 1.0
_LAST_WORDS_S = 2.0


class HeadFollower:
    """Follows one head after another, of a run or of a workflow's group.

    Args:
        run_dir: Run directory with the key of the channel.
        policy: Judges the head's silence, and how long a stop may take.
        stops: Stop requests; every connection begins with the current one.
        state: Returns the state of the head's process; None if it is on another machine.
        kill: Kills a head that was given up.
        hear: Handles a message from the head; returns whether to keep listening.
        say: Prints a sentence for the user.
        clock: Counts only time in which this process runs.
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
        self._num_sent = 0  # how many of these the current head has received

    @property
    def unsent_bytes(self) -> int:
        """Return how many bytes the head has not received yet."""
        return self._channel.unsent_bytes if self._channel is not None else 0

    def send(self, message: messages.Message) -> None:
        """Send a message if connected."""
        if self._channel is not None:
            self._channel.send_nowait(message)

    def repeat(self, message: messages.Message) -> None:
        """Send a message to the current head and to each of its successors."""
        self._repeated.append(message)
        self.send(message)

    def send_stop(self) -> None:
        """Ask the head to stop; later connections begin with this request."""
        stop = self._stops.message()
        if stop is not None:
            self.send(stop)

    async def follow(
        self, address: tuple[str, int], ended: Callable[[], Awaitable[str]]
    ) -> str | None:
        """Follow a newly started head to its end.

        Args:
            address: Where it listens.
            ended: Waits for the end of its process; returns how it ended.

        Returns:
            How it ended, or why it was killed; None when `hear` has ended the conversation.

        Raises:
            MusterError: The key can't be read.
        """
        secret = read_secret(self._run_dir.secret)
        self._num_sent = 0
        self._policy.begin(self._clock())
        ending = asyncio.ensure_future(ended())
        talking = asyncio.create_task(self._talk(address, secret, ending))
        looking = asyncio.create_task(self._look())
        tasks = (talking, looking, ending)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ending in done:  # the head's last messages may still be in transit
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
        """Receive the head's messages; reconnect while the head's process runs."""
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
        for message in self._repeated[self._num_sent :]:
            self.send(message)
        try:
            while True:
                message = await channel.receive()
                self._policy.hear(self._clock())
                if not isinstance(message, messages.Pong) and not self._hear(message):
                    return False
        except ChannelClosedError:
            self._num_sent = len(self._repeated)
            return True
        finally:
            self._channel = None
            channel.abort()

    async def _look(self) -> str:
        """Ping the head; kill it when it hangs or does not end when asked to."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.send(messages.Ping(number=0))
            match self._policy.look(self._clock(), self._state()):
                case Say(text=text):
                    self._say(text)
                case GiveUp(why=why):
                    self._kill()
                    return why
