"""Reports changes of the pods of runs, with one request for all runs of a namespace.

A process and a connection for each run would be too many for a workflow; kubectl alone takes 50 MB.
While pods start, about five lines come for each; they are reported at most once a second, as a
change leads to an API request.
"""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torchmuster.core import proc
from torchmuster.errors import MusterError
from torchmuster.kubernetes.engine.answers import MANAGED_BY, MANAGER
from torchmuster.kubernetes.engine.dialect import kubectl, place_of
from torchmuster.kubernetes.pods.reach import NotAllowedError, refused, rest_of

_AGAIN_S = 5.0
_LATE_S = 2.0
_TELL_EVERY_S = 1.0
_FIRST_POLL_S, _LAST_POLL_S, _GROWTH = 2.0, 10.0, 1.5


@contextlib.contextmanager
def looking(name: str, every_s: float, look: Callable[[], None]) -> Iterator[None]:
    """Call a function repeatedly in a thread of this name, while the context is open."""
    stopping = threading.Event()

    def work() -> None:
        while not stopping.wait(every_s):
            look()

    threading.Thread(target=work, name=name, daemon=True).start()
    try:
        yield
    finally:
        stopping.set()


class PodWatch:
    """The changes of the pods of one Job, from the shared request for its namespace.

    If the user may not watch pods, it polls, up to every 10 s, and `say` gets the line that the
    Role lacks.
    """

    def __init__(self, job_id: str, say: Callable[[str], None] = lambda _: None) -> None:
        self.say = say
        self._place = place_of(job_id)
        self._changed = threading.Condition()
        self._number = 0
        self._changed_at = 0.0

    @property
    def number(self) -> int:
        """Return the number of changes so far."""
        return self._number

    @property
    def changed_at(self) -> float:
        """Return when the last change was reported, by the monotonic clock."""
        return self._changed_at

    def start(self) -> None:
        """Start, in a thread that all watches of this namespace share."""
        _join(self, *self._place[:2])

    def stop(self) -> None:
        """Stop."""
        _leave(self, *self._place[:2])
        self.wake()

    def is_about(self, pods: Iterable[str]) -> bool:
        """Say whether one of these pods is of the Job, or of one with a longer name (harmless)."""
        return any(name.startswith(f"pod/{self._place[2]}-") for name in pods)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Wait until the number of changes differs from what the caller has seen."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != seen, timeout_s)

    def wake(self) -> None:
        """End all waits, as a change does."""
        with self._changed:
            self._number += 1
            self._changed_at = time.monotonic()
            self._changed.notify_all()


@dataclass(slots=True)
class _Request:
    """The request for one namespace; open while there is a watch."""

    context: str
    namespace: str
    watches: list[PodWatch] = field(default_factory=list)
    refusal: str = ""
    _stopping: threading.Event = field(default_factory=threading.Event)
    _child: proc.Child | None = None

    def stop(self) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.send_signal(15)

    def work(self) -> None:
        while not self._stopping.is_set():
            try:
                error = self._watch()
            except MusterError:
                return
            if isinstance(error, NotAllowedError):
                self._look(f"pods may not be watched, so they are looked at ({error.fix})")
                return
            # A server ends a watch after half an hour or more.
            self._stopping.wait(_AGAIN_S)

    def _look(self, refusal: str) -> None:
        """Poll: report a change now and then, whether or not there is one."""
        with _LOCK:
            self.refusal = refusal
            watches = list(self.watches)
        for watch in watches:
            watch.say(refusal)
        pause_s = _FIRST_POLL_S
        while not self._stopping.wait(pause_s):
            pause_s = min(pause_s * _GROWTH, _LAST_POLL_S)
            for watch in list(self.watches):
                watch.wake()

    def _watch(self) -> MusterError | None:
        """Report changes until the request ends; return the error if kubectl gives one."""
        words = ("get", "pods", "-l", f"{MANAGED_BY}={MANAGER}", "-o", "name", "--watch")
        argv = kubectl(self.context, self.namespace, *words)
        argv = [word for word in argv if not word.startswith("--request-timeout")]
        reading, writing = os.pipe2(os.O_CLOEXEC)
        read_error, write_error = os.pipe2(os.O_CLOEXEC)
        try:
            bound_argv = proc.node_program("dies_with_parent", *argv)
            self._child = proc.start(bound_argv, stdout=writing, stderr=write_error)
            if self._stopping.is_set():
                self._child.send_signal(15)
        except MusterError:
            os.close(reading)
            os.close(read_error)
            raise
        finally:
            os.close(writing)
            os.close(write_error)
        try:
            self._tell_lines(reading)
            self._child.wait(_LATE_S)
            stderr = rest_of(read_error)
        finally:
            os.close(reading)
            os.close(read_error)
        return refused(argv, stderr) if stderr else None

    def _tell_lines(self, reading: int) -> None:
        """Report the pods whose names come, at most once a second, until the pipe closes."""
        poller = select.poll()
        poller.register(reading, select.POLLIN)
        begun, changed, tell_at = b"", set[str](), 0.0
        while True:
            left_s = max(0.0, tell_at - time.monotonic())
            if poller.poll(left_s * 1000 if changed else None):
                if not (data := os.read(reading, 1 << 16)):
                    break
                *lines, begun = (begun + data).split(b"\n")
                changed.update(line.decode(errors="replace") for line in lines)
            if changed and time.monotonic() >= tell_at:
                self._tell(changed)
                changed.clear()
                tell_at = time.monotonic() + _TELL_EVERY_S
        self._tell(changed)

    def _tell(self, pods: Iterable[str]) -> None:
        for watch in list(self.watches):
            if watch.is_about(pods):
                watch.wake()


_LOCK = threading.Lock()
_OPEN: dict[tuple[str, str], _Request] = {}


def _join(watch: PodWatch, context: str, namespace: str) -> None:
    with _LOCK:
        request = _OPEN.get((context, namespace))
        is_new = request is None
        if request is None:
            request = _OPEN[context, namespace] = _Request(context, namespace)
        request.watches.append(watch)
        refusal = request.refusal
    if is_new:
        threading.Thread(target=request.work, name="watch", daemon=True).start()
        return
    watch.wake()  # earlier pods were reported before this watch joined
    if refusal:
        watch.say(refusal)


def _leave(watch: PodWatch, context: str, namespace: str) -> None:
    with _LOCK:
        request = _OPEN.get((context, namespace))
        if request is None or watch not in request.watches:
            return
        request.watches.remove(watch)
        if request.watches:
            return
        del _OPEN[context, namespace]
    request.stop()
