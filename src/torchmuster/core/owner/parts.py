"""What an owner works with: engine, display, record, stop signals, the connection to a head."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from torchmuster.core.engines.local import AgentEnd
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import owner_policy
from torchmuster.core.model.events import RecordEvent, line_of
from torchmuster.core.model.lease import OwnClock
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.verdict import AT_ONCE, StopCause, cause_of_stop
from torchmuster.core.net import messages
from torchmuster.core.net.address import read_secret
from torchmuster.core.net.channel import Channel, ChannelClosedError, HandshakeError, Role, connect
from torchmuster.core.owner.session import EarlyStop, hangup_ignored

LAST_WRITES_S = 5.0
_WAIT_S = 0.01


class RecordWriter:
    """Writes an owner's events and small files in order; its exit waits for them, with a limit.

    It writes in a thread: a hung file system must not keep an owner from its heads.

    Args:
        run_dir: The run directory of the files.
        say: Prints for the user what could not be written.
    """

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say
        self._disk = DiskWriter(root=run_dir.path)
        self._reported: set[str] = set()

    async def __aenter__(self) -> Self:
        """Start writing."""
        loop = asyncio.get_running_loop()

        def lose(lines: int, why: str) -> None:
            del lines
            loop.call_soon_threadsafe(self._report_loss, why)

        self._disk.on_loss = lose
        self._disk.reserve_space(self._run_dir.room)
        self._disk.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until everything is written, or the time limit has passed."""
        self._disk.close_file(self._run_dir.events)
        deadline = time.monotonic() + LAST_WRITES_S
        while not (is_written := self._disk.flush(0.0)) and time.monotonic() < deadline:
            await asyncio.sleep(_WAIT_S)
        if is_written:
            with contextlib.suppress(OSError):
                os.unlink(self._run_dir.room)
        self._disk.on_loss = None  # the loop ends
        if not is_written:
            self._report_loss(f"the file system took more than {LAST_WRITES_S:.0f} s")

    def event(self, event: RecordEvent) -> None:
        """Append an event with the current time."""
        self._disk.append(self._run_dir.events, line_of(event).encode())

    def replace(self, path: str, value: Any, *, mode: int = 0o644) -> None:
        """Rewrite a file as JSON."""
        self._disk.replace(path, atomic.as_json(value), mode=mode)

    def _report_loss(self, why: str) -> None:
        if why not in self._reported:
            self._reported.add(why)
            self._say(
                f"files in {self._run_dir.path} can't be written, so other commands may not find this run"
                f" or see all of it: {why}"
            )


_MAX_UNSENT_BYTES = 1 << 20


class RunDisplay(Protocol):
    """What an owner uses to show a run."""

    def say(self, sentence: str) -> None:
        """Show a sentence from muster."""

    def tell(self, event: RecordEvent) -> None:
        """Show the sentence for an event of the run."""

    def show(self, rank: int, stream: int, text: str, left_out: int) -> None:
        """Show output of a rank."""

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is shown."""


class Engine(Protocol):
    """Starts agents at the places of a run: on this machine, or on the nodes of a job.

    Attributes:
        keeps_agents: Agents outlive a head: they find the new one through the file with its
            address.
    """

    keeps_agents: ClassVar[bool]
    head_place: int
    plan: RunPlan
    run_dir: RunDir

    @property
    def address(self) -> tuple[str, int]:
        """Return where the head listens, for this process."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the head's addresses for other machines; empty if only this one can connect."""

    @property
    def pids(self) -> list[int]:
        """Return the pids of the processes that it has started."""

    @property
    def head_state(self) -> str | None:
        """Return the state of the head's process (/proc/PID/stat); None if on another machine."""

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start an agent at every place, the head first."""

    def start_head(self, *, first_attempt: int, restarts_spent: int) -> None:
        """Start only the head's agent: the others are running."""

    def start_place(self, place: int) -> None:
        """Start an agent at one place."""

    def holds(self, place: int) -> bool:
        """Say whether an agent runs at this place."""

    def poll(self) -> list[AgentEnd]:
        """Return the agents that have ended."""

    def has_orphans(self) -> bool:
        """End what ended agents left behind; say whether any of it remains."""

    def kill_head(self) -> None:
        """Kill the head's agent."""

    def kill_all(self) -> None:
        """Kill all agents."""

    def cut_lifeline(self) -> None:
        """Make the agents end themselves."""


def _is_in_background() -> bool:
    """Say whether another process group has the terminal on standard input."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # a terminal that does not control us: anybody may read it
        return False


class StandardInput:
    """Forwards standard input, typed or from a file, to the workers.

    Args:
        send: Forwards the bytes; empty at the end.
        unsent_bytes: Returns how many bytes have not been received yet; a file waits for them.
    """

    def __init__(self, send: Callable[[bytes], None], unsent_bytes: Callable[[], int]) -> None:
        self._send, self._unsent_bytes = send, unsent_bytes
        self._has_ended = False
        self._reading: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start reading; after the end of input, tell a new head about it."""
        loop = asyncio.get_running_loop()
        if self._has_ended:
            self._pass(b"")
            return
        try:
            loop.add_reader(0, self._read)
        except (OSError, ValueError):  # a plain file can't be waited for
            if self._reading is None:
                self._reading = loop.create_task(self._read_file())

    def _read(self) -> None:
        if _is_in_background():
            return  # reading would stop us
        if not self._pass(os.read(0, 4096)):
            asyncio.get_running_loop().remove_reader(0)

    async def _read_file(self) -> None:
        while self._pass(await asyncio.to_thread(os.read, 0, 1 << 16)):
            while self._unsent_bytes() > _MAX_UNSENT_BYTES:
                await asyncio.sleep(_WAIT_S)

    def _pass(self, data: bytes) -> bool:
        """Forward input, byte for byte; say whether more may follow."""
        self._has_ended = not data
        self._send(data)
        return bool(data)


# Stop signals and the time of a job, for `core/model/owner_policy.py`.

LAST_STOP = "the time of the job is over"
_LOOK_EVERY_S = 1.0


@dataclass(slots=True)
class Deadline:
    """Watches the time of one job.

    Attributes:
        limit: Decides which actions are due.
        ask: Asks the scheduler for the end if the environment has none.
        ask_again: Asks it on the way and at the end, from any thread.
    """

    limit: owner_policy.JobTime
    ask: Callable[[], float | None] | None = None
    ask_again: Callable[[], float | None] | None = None

    def find_out(self) -> None:
        """Ask for an unknown end: a warning needs it, and it explains a later signal.

        Don't call it while agents are watched: other children of this process are then ended as
        orphans.
        """
        if self.limit.ends_at is None and self.ask is not None:
            self.limit.ends_at = self.ask()

    async def watch(self, act: Callable[[owner_policy.OwnerAction], None]) -> None:
        """Carry out the actions that are due, until the end of the time."""
        limit = self.limit
        limit.may_ask = self.ask_again is not None
        while not limit.is_done:
            for action in limit.look(time.time()):
                if not isinstance(action, owner_policy.AskForEnd):
                    act(action)
                elif self.ask_again is not None:
                    end = await asyncio.to_thread(self.ask_again)
                    for follows in limit.answer(end, time.time()):
                        act(follows)
            await asyncio.sleep(_LOOK_EVERY_S)

    def is_up(self) -> bool:
        """Return whether a worker that saves and leaves now does so because of the time."""
        return self.limit.is_up(time.time())

    def is_over(self) -> bool:
        """Return whether a signal now is due to the time."""
        return self.limit.is_over(time.time())


@dataclass(slots=True)
class Stops:
    """Counts the stop signals to an owner.

    Attributes:
        judge: Returns the origin of a stop from its signal.
        may_save: Returns whether workers may have been saving since they were asked.
        clock: Returns monotonic time.
        requests: The stop requests so far.
    """

    judge: Callable[[int], StopCause] = cause_of_stop
    may_save: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    requests: owner_policy.StopRequests = field(default_factory=owner_policy.StopRequests)
    _is_deaf_to_sigint: bool = False

    def listen(self, taken: Callable[[], None], early: EarlyStop | None = None) -> None:
        """Handle stop signals in the event loop, also an early one; call `taken` if one counts."""
        self._is_deaf_to_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, AT_ONCE):
            if signum == signal.SIGHUP and hangup_ignored():
                continue
            asyncio.get_running_loop().add_signal_handler(signum, self._take, signum, taken)
        if early is not None and early.signum:
            os.kill(os.getpid(), early.signum)

    def _take(self, signum: int, taken: Callable[[], None]) -> None:
        if self.requests.ask(signum, self.clock(), may_save=self.may_save()):
            taken()

    @property
    def count(self) -> int:
        """Return the number of requests; an immediate one counts as two."""
        return self.requests.count

    @property
    def signum(self) -> int:
        """Return the signal of the last request; 0 for none."""
        return self.requests.signum

    @property
    def cause(self) -> StopCause:
        """Return the origin of the last request, as far as known now."""
        return self.judge(self.signum)

    def message(self) -> messages.Stop | None:
        """Return the message for a head; None without a request."""
        if not self.count:
            return None
        signum, cause = self.signum, self.cause
        if self._is_deaf_to_sigint and signum == signal.SIGINT:
            signum = int(signal.SIGTERM)  # a shell's background job: its workers ignore SIGINT, too
        who = "SIGTERM or `muster cancel`" if cause is StopCause.OUTSIDE else ""
        return messages.Stop(signum=signum, at_once=self.count > 1, cause=cause, who=who)


# The connection to a head: reconnect, repeat standing orders, ping, kill a lost head.

_CALL_AGAIN_S = 0.01
_LAST_WORDS_S = 2.0


@dataclass(slots=True)
class HeadFollower:
    """Follows one head after another, of a run or of a workflow's group.

    Attributes:
        run_dir: Run directory with the key of the channel.
        policy: Judges the head's silence, and how long a stop may take.
        stops: Stop requests; every connection begins with the current one.
        state: Returns the state of the head's process; None if it is on another machine.
        kill: Kills a head that was given up.
        hear: Handles a message from the head; returns whether to keep listening.
        say: Prints a sentence for the user.
        clock: Counts only time in which this process runs.
    """

    run_dir: RunDir
    _: KW_ONLY
    policy: owner_policy.OwnerPolicy
    stops: Stops
    state: Callable[[], str | None]
    kill: Callable[[], None]
    hear: Callable[[messages.Message], bool]
    say: Callable[[str], None]
    clock: OwnClock = field(default_factory=OwnClock)
    _channel: Channel | None = None
    _repeated: list[messages.Message] = field(default_factory=list)
    _num_sent: int = 0  # how many of these the current head has received

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
        stop = self.stops.message()
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
        secret = read_secret(self.run_dir.secret)
        self._num_sent = 0
        self.policy.begin(self.clock())
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
                self.policy.hear(self.clock())
                if not isinstance(message, messages.Pong) and not self.hear(message):
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
            match self.policy.look(self.clock(), self.state()):
                case owner_policy.Say(text=text):
                    self.say(text)
                case owner_policy.GiveUp(why=why):
                    self.kill()
                    return why
