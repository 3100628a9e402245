"""Keeps the spawner of a node: starts it, hears it, ends one that stands still, replaces one that has died."""

import asyncio
import os
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
        """Say whether the agent ends: a spawner that ends now is not missed."""

    @property
    def setup_pids(self) -> frozenset[int]:
        """Return the processes of the node's set-up, which no dead spawner takes along."""

    def tell(self, text: str) -> None:
        """Say a sentence to the user."""

    def send(self, message: Message) -> None:
        """Send to the head, if it is connected."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside all else, until the agent ends."""

    def take_event(self, event: orders.SpawnerEvent) -> None:
        """Take what the spawner says of its children."""

    async def take_spawner_loss(self, why: str, *, was_killed: bool) -> None:
        """Take that all workers have died with their spawner."""


class SpawnerKeeper:
    """The spawners of one agent, one after the other.

    Args:
        program: What the workers run; the node's set-up may still choose another interpreter.
        environment: Its variables.
        socket_path: Where workers call the agent.
        clock: The agent's.
        user: The agent.
        waits: Workers go on while the agent is stopped.

    Attributes:
        link: The spawner that lives; None while there is none.
        ready: What it has said of itself when it could start workers.
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
        self._begins_anew = False  # one has refused an import, and ends
        self._num_early_deaths = 0  # of spawners, while they imported
        self._counters = memory.read_counters()

    @property
    def pid(self) -> int | None:
        """Return the spawner's process id."""
        return self.link.pid if self.link is not None else None

    @property
    def has_torch(self) -> bool:
        """Say whether the job's interpreter has torch, so that a store can be offered."""
        return self.ready is not None and self.ready.torch is not None

    def order(self, order: orders.SpawnerOrder, *fds: int) -> None:
        """Send an order with descriptors, if a spawner lives."""
        if self.link is not None:
            self.link.order(order, fds)

    # Its start.

    def adopt(self, child: HasStatus, control: Any) -> None:
        """Take over a spawner that has been started."""
        self.ready = None
        self._still["spawner"].begin()
        self.link = make_link(child, control, in_two_turns(self._take), in_two_turns(self._lose))
        self.link.say, self.link.tell = self._user.voice.print, self._user.tell
        self.link.open()

    def start_with(self, program: Program, environment: Mapping[str, str]) -> None:
        """Take the job's interpreter and variables, and start the spawner unless one runs.

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

    # What it says.

    def announce(self) -> None:
        """Tell the head that workers can be started here, or that they never can."""
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
        """Say that this node can't run the job; the first reason stays."""
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
                self._refused, self._begins_anew = event, True
            case orders.FellBack():
                self._user.send(Notice(text=fell_back(event.why)))
            case orders.ChildStarted(kind="store"):
                self.store_pid = event.pid
                self._still["store"].begin()
        self._user.take_event(event)

    # Its end.

    def look(self) -> None:
        """Keep the spawner's lease alive; end it, or the store, when it stands still: only its death has consequences."""
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
        """Let all workers be killed; a spawner that is stopped obeys no order, so it is killed with them after 3 s."""
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
        link, self.link = self.link, None  # an order that comes now waits for the next
        if link is not None and not self._user.is_ending:
            self._user.spawn(self._replace(link))

    async def _replace(self, link: SpawnerLink) -> None:
        deadline = time.monotonic() + 5.0
        while (status := link.exit_status()) is None and time.monotonic() < deadline:
            await asyncio.sleep(REAP_EVERY_S)
        if self._begins_anew:
            self._begins_anew = False
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
        while proc.end_children(self._user.setup_pids):  # what its dead workers started is ours now
            await asyncio.sleep(REAP_EVERY_S)
        self.adopt(*await self._start_another())
        status = status if status is not None else -int(signal.SIGKILL)
        why = f"its spawner ended ({contract.describe_exit(status)})"
        await self._user.take_spawner_loss(why, was_killed=status == -signal.SIGKILL)

    async def _start_another(self) -> tuple[proc.Child, Any]:
        words = self.program, self.environment, self._socket_path, self._refused
        return await asyncio.to_thread(start_spawner, *words)

    async def end(self) -> None:
        """Close the pair: the spawner ends its children and itself, or is killed after a second."""
        if self.link is None:
            return
        self.link.close()
        deadline = time.monotonic() + 1.0
        while self.link.exit_status() is None and time.monotonic() < deadline:
            await asyncio.sleep(REAP_EVERY_S)
        self.link.kill()


def in_two_turns(hear: Callable[..., None]) -> Callable[..., None]:
    """Return a callback that hears two turns of the loop later.

    A scheduler's SIGTERM reaches workers and agent at once. Its handler runs in the turn after the one that noticed it, and
    must come before the word of a worker that has ended by it: else a cancelled run looks like one that is complete.
    """

    def later(*values: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(hear, *values))

    return later


def fell_back(why: str) -> str:
    """Return the sentence on a spawner that does not fork."""
    return f"workers are started as fresh interpreters, not forked: {why}"


def describe_status(status: int) -> str:
    """Return a status of `waitpid` in words."""
    if os.WIFSIGNALED(status):
        return contract.signal_name(os.WTERMSIG(status))
    return f"exit code {os.WEXITSTATUS(status)}"
