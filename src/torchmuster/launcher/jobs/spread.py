"""The head of a `muster torchrun` that one host of a job runs: starts the other hosts' agents.

The head observes whether it has to: if an agent of another host calls, the job's script started
that one, and the head starts none. Standard library only; imported only inside a job of several
hosts.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmuster.core import proc
from torchmuster.core.model import codec, events
from torchmuster.core.model.events import RecordEvent
from torchmuster.core.model.text import few_of
from torchmuster.core.net.address import own_addresses
from torchmuster.core.proc import Starter, describe_end
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.allocation import OwnJob
from torchmuster.launcher.model.job import NodeLauncher
from torchmuster.launcher.programs.enter import EnterOrder, enter_argv

# From when the head listens. Agents started together with it called within 0.15 s (measured, 2 busy
# cores); a loop of ssh and a cold file system take longer. An agent that comes still later is sent
# away without harm.
SPREAD_AFTER_S = 1.5
ORDER = "MUSTER_TORCHRUN_ORDER"
_POLL_S = 0.2
_MAX_TRIES = 3
_ENDS_ITSELF_S = 3.0
_TERM_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadOrder:
    """What the head passes to an agent that it starts: place, host, and the head's addresses."""

    place: int
    host: str
    heads: tuple[tuple[str, int], ...]

    def to_text(self) -> str:
        """Encode the order as the value of a variable."""
        return codec.to_word(self)


def take_order() -> SpreadOrder | None:
    """Return a head's order and remove it from the environment; None if there is none.

    Raises:
        MusterError: The variable doesn't hold an order.
    """
    text = os.environ.pop(ORDER, None)
    if text is None:
        return None
    try:
        return codec.from_plain(SpreadOrder, json.loads(text))
    except ValueError as error:
        fix = f"unset {ORDER}: only `muster torchrun` itself sets it"
        raise MusterError(
            "this is no order of a head", where=ORDER, why=str(error), fix=fix
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadHosts:
    """The hosts that a torchrun command should run on.

    Attributes:
        job: The job with these nodes, this one first.
        spreads: Whether the head may start the others; False when the user or a launcher does.
        is_first: Whether this is the job's first host, where its script runs.
        hint: What to say while some are missing.
        notes: Sentences on what was chosen.
    """

    job: OwnJob
    spreads: bool
    is_first: bool = False
    hint: str = ""
    notes: tuple[str, ...] = ()


def head_addresses(endpoint: str, port: int) -> tuple[tuple[str, int], ...]:
    """Return the addresses of this head; the endpoint's comes first if it is one of ours."""
    own = own_addresses()
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(endpoint, 0, socket.AF_INET, socket.SOCK_STREAM)
        named = [str(sockaddr[0]) for *_, sockaddr in found]
        own.sort(key=lambda address: address not in named)
    return tuple((address, port) for address in own or ["127.0.0.1"])


@dataclass(slots=True)
class _Start:
    tries: int = 0
    has_called: bool = False
    starter: Starter | None = None

    @property
    def child(self) -> proc.Child | None:
        """The process that starts the agent, while it runs."""
        return self.starter.child if self.starter is not None else None


@dataclass
class Spreader:
    """Starts the agents of other hosts for a head in this process, and ends them with it.

    Attributes:
        command: This process's command, to run on the other hosts.
        environment: Path of the file (0600) that passes this process's variables to them.
    """

    party: SpreadHosts
    heads: tuple[tuple[str, int], ...]
    command: list[str]
    environment: str
    after_s: float = SPREAD_AFTER_S
    _event: Callable[[RecordEvent], object] | None = None
    _starts: dict[int, _Start] = field(default_factory=dict)
    _wanted: set[int] = field(default_factory=set)
    _here: set[str] = field(default_factory=set)
    _task: "asyncio.Task[None] | None" = None

    def begin(self, event: Callable[[RecordEvent], object]) -> None:
        """Wait for agents that others start, then start the missing ones; `event` records it."""
        self._event = event
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def need(self, places: Sequence[int]) -> None:
        """Record places that the head lacks."""
        self._wanted.update(places)

    def hear(self, event: RecordEvent) -> None:
        """Record agents that have joined, and nodes that are lost."""
        names = self.party.job.node_names
        match event:
            case events.AgentJoinedEvent(node=node) if node != names[0]:
                self._here.add(node)
                for place, name in enumerate(names):
                    if name == node and place in self._starts:
                        self._starts[place].has_called = True
                        self._starts[place].tries = 0
                self._wanted -= {place for place, name in enumerate(names) if name == node}
            case events.NodeLostEvent(node=node):
                self._here.discard(node)

    def is_ours(self, host: str) -> bool:
        """Return whether an agent for this host was started from here."""
        short = host.partition(".")[0]
        return any(self.party.job.node_names[p].partition(".")[0] == short for p in self._starts)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.after_s
        while not self._here and loop.time() < deadline:
            await asyncio.sleep(_POLL_S / 4)
        if self._here:
            return  # the job's script starts them
        self._wanted = set(range(1, len(self.party.job.nodes)))
        self._say(self._sentence())
        self.party.job.leave_environment(self.environment)
        while True:
            self._reap()
            for place in sorted(self._wanted):
                self._start(place)
            await asyncio.sleep(_POLL_S)

    def _sentence(self) -> str:
        names = self.party.job.node_names
        kind = self.party.job.launcher.kind
        way = "" if kind in (None, NodeLauncher.PBSDSH) else f" by {kind.value}"
        others = few_of(names[1:], 8)
        done = f"started here for {others} too{way} (--no-spread leaves that to you)"
        return f"torchrun was started on {names[0]} only: {done}"

    def _start(self, place: int) -> None:
        """Start an agent, unless its last start still runs or too many have failed."""
        if not 0 < place < len(self.party.job.nodes):
            self._wanted.discard(place)
            return
        start = self._starts.setdefault(place, _Start())
        if start.starter is not None and start.starter.is_late(time.monotonic()):
            start.starter.child.send_signal(signal.SIGKILL)  # it hangs, or its agent is lost
            return  # the next poll reaps it and tries again
        if start.starter is not None or start.tries >= _MAX_TRIES:
            return
        start.tries += 1
        start.has_called = False
        self._wanted.discard(place)
        try:
            start.starter = proc.start_agent(self._argv(place), spared=True)
        except MusterError as error:
            self._say(f"{self.party.job.node_names[place]}: {error}")

    def _argv(self, place: int) -> list[str]:
        node = self.party.job.nodes[place]
        order = SpreadOrder(place=place, host=node.name, heads=self.heads)
        enter = EnterOrder(
            environment=self.environment,
            cwd=os.getcwd(),
            variable=(f"{ORDER}={order.to_text()}",),
            command=tuple(self.command),
        )
        return self.party.job.argv(node, enter_argv(sys.executable, enter))

    def _reap(self) -> None:
        for place, start in self._starts.items():
            status = start.child.poll() if start.child is not None else None
            if start.starter is None or status is None:
                continue
            proc.let_go(start.starter.child)
            said, start.starter = start.starter.said(), None
            if not start.has_called:
                left = _MAX_TRIES - start.tries
                what = describe_end(status, said)
                self._say(f"{self.party.job.node_names[place]}: {what}; {left} more tries")
                self._wanted.add(place)

    def _say(self, text: str) -> None:
        if self._event is not None:
            self._event(events.NoticeEvent(node=self.party.job.node_names[0], text=text))

    async def close(self) -> None:
        """End what was started here; agents that were asked to end do so by themselves."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        children = [start.child for start in self._starts.values() if start.child is not None]
        for signum, limit_s in (
            (None, _ENDS_ITSELF_S),
            (signal.SIGTERM, _TERM_S),
            (signal.SIGKILL, 1.0),
        ):
            for child in children:
                if signum is not None:
                    child.send_signal(signum)
            children = await _wait_for(children, limit_s)
        with contextlib.suppress(OSError):
            os.unlink(self.environment)


async def _wait_for(children: list[proc.Child], limit_s: float) -> list[proc.Child]:
    """Return the children that still run after this time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while (left := [c for c in children if c.poll() is None]) and loop.time() < deadline:
        await asyncio.sleep(0.02)
    for child in children:
        if child not in left:
            proc.let_go(child)
    return left
