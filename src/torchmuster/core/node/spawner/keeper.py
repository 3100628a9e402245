"""Keeps a spawner on a node: starts it, listens to it, kills a stalled one, replaces a dead one."""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from torchmuster.core import proc
from torchmuster.core.model import contract
from torchmuster.core.model.lease import LEASE_S, OwnClock, Stillness
from torchmuster.core.model.plan import Program
from torchmuster.core.model.verdict import MORE_MEMORY
from torchmuster.core.net.messages import Message, Notice, SpawnerReady, SpawnerRefused
from torchmuster.core.node import kernel as memory
from torchmuster.core.node.output import Voice
from torchmuster.core.node.setup import other_interpreter
from torchmuster.core.node.spawner import messages as orders
from torchmuster.core.node.spawner.start import SpawnerLink, make_link, start_spawner
from torchmuster.core.proc import HasStatus
from torchmuster.errors import MusterError

REAP_EVERY_S = 0.01
_STOPPED_S = 3.0
_MAX_EARLY_DEATHS = 3
_NO_MEMORY = "memory ran out while the job's interpreter started"


class SpawnerUser(Protocol):
    """What a keeper needs of its agent."""

    voice: Voice

    @property
    def is_ending(self) -> bool:
        """Return whether the agent is ending: a spawner that ends now is not replaced."""

    @property
    def setup_pids(self) -> frozenset[int]:
        """Return the processes of the node's setup, which survive a dead spawner."""

    def tell(self, text: str) -> None:
        """Show the user a sentence."""

    def send(self, message: Message) -> None:
        """Send to the head, if it is connected."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something concurrently, until the agent ends."""

    def take_event(self, event: orders.SpawnerEvent) -> None:
        """Handle an event from the spawner."""

    async def take_spawner_loss(self, why: str, *, was_killed: bool) -> None:
        """Handle the death of the spawner, with which all workers have died."""


class SpawnerKeeper:
    """The successive spawners of one agent.

    Args:
        program: What the workers run; the node's setup may still choose another interpreter.
        environment: The program's variables.
        socket_path: Where workers call the agent.
        clock: The agent's clock.
        user: The agent.
        waits: Workers continue while the agent is stopped.

    Attributes:
        link: The link to the running spawner; None while there is none.
        ready: The spawner's message that it can start workers.
        refusal: Why this node can't run the job at all.
        store_pid: The process of the attempt's store, on the head's node.
    """

    def __init__(
        self,
        program: Program,
        environment: Mapping[str, str],
        socket_path: str,
        clock: OwnClock,
        user: SpawnerUser,
        *,
        waits: bool = False,
    ) -> None:
        self.program, self.environment = program, dict(environment)
        self.link: SpawnerLink | None = None
        self.ready: orders.InterpreterReady | None = None
        self.refusal: SpawnerRefused | None = None
        self.store_pid: int | None = None
        self._socket_path, self._user, self._waits = socket_path, user, waits
        self._still = {"spawner": Stillness(clock), "store": Stillness(clock)}
        self._refused: orders.ImportsRefused | None = None
        self._starts_over = False  # a spawner has refused an import and is ending
        self._num_early_deaths = 0  # of spawners that died during their imports
        self._counters = memory.read_counters()

    @property
    def pid(self) -> int | None:
        """Return the spawner's process id."""
        return self.link.pid if self.link is not None else None

    @property
    def has_torch(self) -> bool:
        """Return whether the job's interpreter has torch, so that a store can be offered."""
        return self.ready is not None and self.ready.torch is not None

    def order(self, order: orders.SpawnerOrder, *fds: int) -> None:
        """Send an order with descriptors, if a spawner is running."""
        if self.link is not None:
            self.link.order(order, fds)

    # Its start.

    def adopt(self, child: HasStatus, control: Any) -> None:
        """Take over a started spawner."""
        self.ready = None
        self._still["spawner"].begin()
        self.link = make_link(child, control, in_two_turns(self._take), in_two_turns(self._lose))
        self.link.say, self.link.tell = self._user.voice.print, self._user.tell
        self.link.open()

    def start_with(self, program: Program, environment: Mapping[str, str]) -> None:
        """Set the job's interpreter and variables, and start the spawner unless one runs.

        Raises:
            MusterError: No interpreter can be executed on this node.
        """
        self.program, self.environment = program, dict(environment)
        if self.link is not None:
            return
        try:
            started = start_spawner(program, environment, self._socket_path)
        except MusterError as error:
            other = other_interpreter(program, environment)
            if other is None:
                raise
            text = f"{program.python[0]} can't run here ({error.why}): {other.python[0]} does"
            self._user.tell(text)
            self.program = other
            started = start_spawner(other, environment, self._socket_path)
        self.adopt(*started)

    # Its messages.

    def announce(self) -> None:
        """Tell the head that workers can be started here, or never can."""
        if self.ready is not None:
            why = fell_back(self.ready.why) if self.ready.why else None
            python, torch, forks = self.ready.python, self.ready.torch, self.ready.forks
            ready = SpawnerReady(
                python=python, torch=torch, forks=forks, why=why, imports_why=self.ready.imports_why
            )
            self._user.send(ready)
        if self.refusal is not None:
            self._user.send(self.refusal)

    def refuse(self, why: str, **more: Any) -> None:
        """Report that this node can't run the job; the first reason stays."""
        self.refusal = self.refusal or SpawnerRefused(why=why, **more)
        self._user.send(self.refusal)

    def _take(self, event: orders.SpawnerEvent) -> None:
        match event:
            case orders.SpawnerPong():
                self._still["spawner"].begin()
            case orders.InterpreterReady():
                self.ready, self._num_early_deaths = event, 0
                self.announce()
            case orders.InterpreterRefused():
                self.refuse(event.why, hint=event.hint)
            case orders.ImportsRefused():
                self._refused, self._starts_over = event, True
            case orders.FellBack():
                self._user.send(Notice(text=fell_back(event.why)))
            case orders.ChildStarted(kind="store"):
                self.store_pid = event.pid
                self._still["store"].begin()
        self._user.take_event(event)

    # Its end.

    def look(self) -> None:
        """Keep the spawner's lease alive; kill a stalled spawner or store.

        Only their death has consequences.
        """
        if self.link is None:
            return
        self.link.order(orders.PingSpawner(waits=self._waits))
        for name, pid in (("spawner", self.link.pid), ("store", self.store_pid)):
            facts = proc.read_process(pid) if pid is not None else None
            if facts is None or (name == "store" and facts.parent_pid != self.link.pid):
                continue
            answers = name == "spawner" and self.ready is not None
            if self._still[name].is_lost(facts.state, answers=answers):
                self._still[name].begin()
                self._user.tell(f"the {name} has not responded for {LEASE_S:.0f} s: it is killed")
                self.link.kill() if name == "spawner" else proc.kill_quietly(facts.pid)

    def kill_children(self, is_done: Callable[[], bool], *, ended_well: bool) -> None:
        """Order the spawner to kill all workers.

        A stopped spawner obeys no order, so it is killed after 3 s, and its workers with it.
        """
        if self.link is not None:
            self.link.order(orders.KillChildren(ended_well=ended_well))
            asyncio.get_running_loop().call_later(_STOPPED_S, self._end_stopped, is_done)

    def _end_stopped(self, is_done: Callable[[], bool]) -> None:
        if is_done() or self.link is None:
            return
        facts = proc.read_process(self.link.pid)
        if facts is not None and facts.state in ("T", "t"):
            self._user.voice.say(
                "the spawner does not respond: it is killed, and its workers with it"
            )
            self.link.kill()

    def _lose(self) -> None:
        link, self.link = self.link, None  # an order that comes now waits for the next spawner
        if link is not None and not self._user.is_ending:
            self._user.spawn(self._replace(link))

    async def _replace(self, link: SpawnerLink) -> None:
        deadline = time.monotonic() + 5.0
        while (status := link.exit_status()) is None and time.monotonic() < deadline:
            await asyncio.sleep(REAP_EVERY_S)
        if self._starts_over:
            self._starts_over = False
            link.kill()
            self.adopt(*await self._start_another())
            return
        killed = status is not None and status < 0
        self._num_early_deaths += self.ready is None
        if self.ready is None and not (killed and self._num_early_deaths < _MAX_EARLY_DEATHS):
            why = (
                "it ended before it was ready" if status is None else contract.describe_exit(status)
            )
            ended = f"the job's interpreter ended: {why}"
            evidence = None
            if status == -signal.SIGKILL:
                evidence = await asyncio.to_thread(memory.explain_kill, self._counters, link.pid)
            because = "\n".join(text for text in (link.said, evidence, ended) if text)
            of_memory = {"what": _NO_MEMORY, "hint": MORE_MEMORY} if evidence else {}
            self.refuse(because, **(link.last_words() or of_memory))
            return
        link.kill()
        while proc.end_children(self._user.setup_pids):  # we inherit what its dead workers started
            await asyncio.sleep(REAP_EVERY_S)
        self.adopt(*await self._start_another())
        status = status if status is not None else -int(signal.SIGKILL)
        why = f"its spawner ended ({contract.describe_exit(status)})"
        await self._user.take_spawner_loss(why, was_killed=status == -signal.SIGKILL)

    async def _start_another(self) -> tuple[proc.Child, Any]:
        return await asyncio.to_thread(
            start_spawner, self.program, self.environment, self._socket_path, self._refused
        )

    async def end(self) -> None:
        """Close the connection: the spawner ends its children and itself or is killed after 1 s."""
        if self.link is None:
            return
        self.link.close()
        deadline = time.monotonic() + 1.0
        while self.link.exit_status() is None and time.monotonic() < deadline:
            await asyncio.sleep(REAP_EVERY_S)
        self.link.kill()


def in_two_turns(hear: Callable[..., None]) -> Callable[..., None]:
    """Return a callback that calls `hear` two turns of the loop later.

    A scheduler's SIGTERM reaches workers and agent at once. The agent handles it in the turn after
    the one that noticed it. That must come before the report of a worker that the signal ended:
    otherwise a cancelled run looks complete.
    """

    def later(*values: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(hear, *values))

    return later


def fell_back(why: str) -> str:
    """Return the sentence about a spawner that does not fork."""
    return f"workers are started as fresh interpreters, not forked: {why}"
