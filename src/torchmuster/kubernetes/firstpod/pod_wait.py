"""Waits, with a limit, until other pods accept sessions; reports every 5 s which don't, and why."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torchmuster.core.model.text import few_of
from torchmuster.core.net.channel import HandshakeError
from torchmuster.errors import JoinTimeoutError
from torchmuster.kubernetes.node.call import connect_with_retry, words_of
from torchmuster.kubernetes.node.order import PodOrder

_SAY_EVERY_S = 4.5
_LOOK_S = 1.0
_FRESH_S = 30.0  # how long a client's note counts
_MOST_WORDS = 300
_TRY_EVERY_S = 0.25
_MOST_TRIES = 64.0  # tries a second, over all pods: each asks the cluster's DNS for ten names
_MOST_NAMES = 64  # looked up at a time: an unanswered look-up must not block others
_SHOWN = 4


@dataclass(slots=True)
class PodWait:
    """The pods of a run, and which of them accept sessions.

    Attributes:
        least: The number of pods that have to answer.
        most: The number of pods that can be used.
        last_call_s: How long to wait for more than `least`.
        say_every_s: How often to report what is missing.
    """

    order: PodOrder
    secret: bytes
    least: int
    most: int
    last_call_s: float
    say: Callable[[str], None]
    say_every_s: float = _SAY_EVERY_S
    _open: set[int] = field(default_factory=set)
    _why: dict[int, str] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, limit_s: float) -> list[int]:
        """Return the pods that answer, in their order.

        Time in which a client reports that the cluster has no room is queueing and does not count.

        Raises:
            JoinTimeoutError: Too few pods answered within the limit.
        """
        loop = asyncio.get_running_loop()
        threads = min(self.order.num_pods, _MOST_NAMES)
        loop.set_default_executor(ThreadPoolExecutor(threads, "names"))
        begun, say_at = loop.time(), loop.time() + self.say_every_s
        looked_at = begun
        tries = [asyncio.create_task(self._try(i)) for i in range(self.order.num_pods)]
        enough_at: float | None = None
        try:
            while len(self._open) < self.most:
                now, no_room = loop.time(), self._no_room()
                begun += now - looked_at if no_room else 0.0
                looked_at = now
                enough_at = enough_at or (now if len(self._open) >= self.least else None)
                if enough_at is not None and now >= enough_at + self.last_call_s:
                    break
                if now >= begun + limit_s:
                    raise self._error(limit_s)
                if now >= say_at:
                    left = no_room or f"{begun + limit_s - now:.0f} s left"
                    self.say(f"waiting for pods: {self._missing()}; {left}")
                    say_at = now + self.say_every_s
                self._changed.clear()
                ends = [begun + limit_s, say_at, *([now + _LOOK_S] if no_room else [])]
                ends += [enough_at + self.last_call_s] if enough_at is not None else []
                await self._until(min(ends))
        finally:
            for one in tries:
                one.cancel()
            await asyncio.gather(*tries, return_exceptions=True)
        return sorted(self._open)

    async def _until(self, at: float) -> None:
        try:
            async with asyncio.timeout_at(at):
                await self._changed.wait()
        except TimeoutError:
            return

    def _no_room(self) -> str:
        """Return why the cluster has no room, from a client's recent note; empty without one."""
        try:
            with open(self.order.no_room) as note:
                age_s = time.time() - os.fstat(note.fileno()).st_mtime
                return note.read(_MOST_WORDS).strip() if age_s < _FRESH_S else ""
        except (OSError, ValueError):
            return ""

    async def _try(self, index: int) -> None:
        host = self.order.address(index) if index else "127.0.0.1"
        while index not in self._open:
            try:
                channel = await connect_with_retry(host, self.order.port, self.secret, 0.0)
            except (OSError, HandshakeError) as error:
                self._why[index] = words_of(error)
                num_missing = self.order.num_pods - len(self._open)
                await asyncio.sleep(max(_TRY_EVERY_S, num_missing / _MOST_TRIES))
                continue
            channel.abort()
            self._open.add(index)
            self._changed.set()

    def _missing(self) -> str:
        return few_of(self._words(range(self.order.num_pods)), _SHOWN)

    def _words(self, pods: Sequence[int]) -> list[str]:
        missing = [pod for pod in pods if pod not in self._open]
        return [f"{self.order.host(i)} ({self._why.get(i, 'not called yet')})" for i in missing]

    def _error(self, limit_s: float) -> JoinTimeoutError:
        names = [self.order.host(i) for i in range(self.order.num_pods) if i not in self._open]
        hint = f"`kubectl describe pod {names[0]}` tells what it waits for; a longer wait: --join-timeout {2 * limit_s:.0f}s"
        whys = {why for index, why in self._why.items() if index not in self._open}
        if any("no answer" in why for why in whys):
            hint = f"is there a NetworkPolicy or a mesh? pods of one run need all TCP ports of each other; {hint}"
        elif any("name" in why for why in whys):
            hint += "; one that runs has no name where the cluster's DNS or the run's headless Service lacks it"
        return JoinTimeoutError(
            f"only {len(self._open)} of {self.least} pods came within {limit_s:.0f} s",
            where=few_of(names, _SHOWN),
            why="\n".join(self._words(range(self.order.num_pods))[:_SHOWN]),
            fix=hint,
        )
