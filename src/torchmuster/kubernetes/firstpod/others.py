"""The other pods of a run: a wait until they accept sessions, and copies of the record on their disks.

The wait has a limit, and reports every 5 s which pods don't, and why. Two other pods keep a copy of
the record, in case a first pod without volume is lost. The owner in its replacement restores it, so
attempts, restarts and the client's copy continue. Snapshots are too large for this: they need a
volume.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torchmuster.core.files import atomic
from torchmuster.core.model.text import few_of
from torchmuster.core.net.channel import HandshakeError
from torchmuster.errors import JoinTimeoutError, MusterError
from torchmuster.kubernetes.node.call import connect_with_retry, words_of
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.node.record import kept_folder, kept_scope
from torchmuster.kubernetes.pods.pull import BROKEN, Pull, Push, into, program
from torchmuster.launcher.engines.ssh_host import Starts
from torchmuster.launcher.net.replica import Copy
from torchmuster.launcher.node.remote.files import mark_of

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
                    self.say(f"waiting for pods: {few_of(self._words(), _SHOWN)}; {left}")
                    say_at = now + self.say_every_s
                self._changed.clear()
                ends = [begun + limit_s, say_at, *([now + _LOOK_S] if no_room else [])]
                ends += [enough_at + self.last_call_s] if enough_at is not None else []
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(ends)):
                        await self._changed.wait()
        finally:
            for one in tries:
                one.cancel()
            await asyncio.gather(*tries, return_exceptions=True)
        return sorted(self._open)

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

    def _missing(self) -> list[int]:
        return [index for index in range(self.order.num_pods) if index not in self._open]

    def _words(self) -> list[str]:
        whys = ((index, self._why.get(index, "not called yet")) for index in self._missing())
        return [f"{self.order.host(index)} ({why})" for index, why in whys]

    def _error(self, limit_s: float) -> JoinTimeoutError:
        names = [self.order.host(index) for index in self._missing()]
        hint = f"`kubectl describe pod {names[0]}` tells what it waits for; a longer wait: --join-timeout {2 * limit_s:.0f}s"
        whys = {why for index, why in self._why.items() if index not in self._open}
        if any("no answer" in why for why in whys):
            hint = f"is there a NetworkPolicy or a mesh? pods of one run need all TCP ports of each other; {hint}"
        elif any("name" in why for why in whys):
            hint += "; one that runs has no name where the cluster's DNS or the run's headless Service lacks it"
        return JoinTimeoutError(
            f"only {len(self._open)} of {self.least} pods came within {limit_s:.0f} s",
            where=few_of(names, _SHOWN),
            why="\n".join(self._words()[:_SHOWN]),
            fix=hint,
        )


# Copies of a run's record on the disks of other pods.


_COPIES = 2
_AGAIN_S, _ASK_S = 2.0, 10.0
_LAST_S = 3.0  # of a pod's grace when it is taken away


@dataclass(slots=True)
class RecordReplicas:
    """Keeps copies of the record in other pods.

    Attributes:
        starts: Opens a session with a pod.
        say: Tells the user.
    """

    order: PodOrder
    starts: Starts
    say: Callable[[str], None] = lambda _: None
    _said: set[str] = field(default_factory=set)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def _others(self) -> range:
        """Return the pods that keep a copy: none with a volume, which outlives the pods."""
        return range(1, 0 if self.order.has_volume else min(self.order.num_pods, 1 + _COPIES))

    def start(self) -> None:
        """Start copying, in one thread for each pod."""
        for index in self._others:
            thread = threading.Thread(
                target=self._push, args=(index,), name="neighbours", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self, *, is_taken_away: bool = False) -> None:
        """Stop copying; if this pod is taken away, first let the last lines arrive."""
        self._stopping.set()
        for thread in self._threads if is_taken_away else ():
            thread.join(_LAST_S)

    def _push(self, index: int) -> None:
        root = self.order.run_dir.path
        argv = [self.order.address(index), program("pod-keep")]
        while not self._stopping.is_set():
            try:
                scope, mark = kept_scope(self.order), mark_of(root)
                Push(argv, self.starts).run(root, scope, mark, self._stopping)
            except BROKEN as error:
                self._note(index, error)
            self._stopping.wait(_AGAIN_S)

    def _note(self, index: int, error: Exception) -> None:
        """Report once why a pod can't keep a copy, e.g. a full disk; ignore broken connections."""
        why = error.why if isinstance(error, MusterError) else None
        if why is not None and why not in self._said:
            self._said.add(why)
            self.say(f"{self.order.host(index)} can't keep a copy of the record: {why}")

    def find(self) -> None:
        """Restore the record from the pod that has the most events, if there is none here."""
        run_dir = self.order.run_dir
        if not self._others or os.path.exists(self._events(run_dir.path)):
            return
        found = {index: self._fetch(index) for index in self._others}
        index = max(found, key=lambda one: len(_lines_of(self._events(found[one]))))
        if not _lines_of(self._events(found[index])):
            return
        for path in kept_scope(self.order).files(found[index]):
            target = os.path.join(run_dir.path, path)
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            atomic.replace_file(target, _lines_of(os.path.join(found[index], path)), mode=0o600)
        self.say(
            f"this pod takes the place of a lost one: the record goes on from {self.order.host(index)}"
        )

    def _events(self, root: str) -> str:
        """Return the path of the events in a copy of the run directory."""
        group = self.order.group
        return os.path.join(root, *(["groups", group] if group is not None else []), "events.jsonl")

    def _fetch(self, index: int) -> str:
        """Fetch the copy that a pod keeps; return its folder."""
        folder = f"{kept_folder(self.order)}.of-{index}"
        argv = [self.order.address(index), program("pod-record --once --kept")]
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for _ in range(2):  # the node may be loaded, and the record must not be lost
            copy = Copy(folder, kept_scope(self.order), mode=0o600)
            with contextlib.suppress(*BROKEN):
                if Pull(argv, self.starts).run(copy.has(), into(copy), limit_s=_ASK_S):
                    break
        return folder


def _lines_of(path: str) -> bytes:
    """Return the complete lines of a file, without a partial last one."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        data = file.read()
        return data[: data.rfind(b"\n") + 1]
    return b""
