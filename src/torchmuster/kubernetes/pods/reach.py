"""Reaches pods by kubectl: questions, a port-forward that may break, and a watch of their changes."""

import contextlib
import json
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.errors import MusterError
from torchmuster.kubernetes.engine.answers import (
    CONTAINER,
    INDEX_LABEL,
    MANAGED_BY,
    MANAGER,
    RUN_LABEL,
    Pod,
    PodsOfRun,
    read_objects,
    runs_of,
)
from torchmuster.kubernetes.engine.dialect import DIALECT, kubectl, kubectl_for, place_of
from torchmuster.kubernetes.node import order as orders
from torchmuster.kubernetes.node.call import call_argv
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.jobs.answers import ask_patiently, has_limited_questions

_ASK_S = 25.0
_FORWARD_S = 60.0  # a login plug-in or a VPN may take long
_LOOK_FORWARD_S = 8.0
_LATE_S = 2.0
MEMBER_JOB = os.path.join("pods", "job.json")  # in the directory of a sweep member
_LINE = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) ->")


class NotAllowedError(EngineError):
    """The user may not do this with pods; retrying is useless."""


def pod_order(run_dir: RunDir, group: str | None = None) -> PodOrder | None:
    """Return the order of the pods of a run or a workflow group; None if it is not in pods."""
    folder = run_dir.path if group is None else run_dir.group(group).path
    path = os.path.join(folder, "pods", orders.ORDER_FILE)
    with contextlib.suppress(codec.CodecError):
        return orders.read_order(path) if os.path.exists(path) else None
    return None


def job_of(run_dir: RunDir, group: str | None = None) -> str | None:
    """Return the job of a run in pods.

    For a workflow group it is the one with the head, for a sweep member that of all members.
    """
    noted = atomic.read_json(run_dir.job if group is None else run_dir.group(group).job)
    if noted is None:
        noted = atomic.read_json(os.path.join(run_dir.path, MEMBER_JOB))
    job_id = noted.get("job_id") if isinstance(noted, dict) else None
    return job_id if isinstance(job_id, str) else None


def is_submitted_here(run_dir: RunDir) -> bool:
    """Say whether this machine submitted a run in pods; otherwise its directory is a copy."""
    noted = atomic.read_json(run_dir.job)
    return isinstance(noted, dict) and "request" in noted


@dataclass(frozen=True, slots=True)
class RunInPods:
    """A run, a workflow group or a sweep member in pods.

    Attributes:
        run_dir: Its directory here; for a group the workflow's.
        order: The order of its pods.
        job_id: Its Job; for a group the one with the head, for a member that of all members.
    """

    run_dir: RunDir
    order: PodOrder
    job_id: str

    @classmethod
    def of(cls, run_dir: RunDir, group: str | None = None) -> "RunInPods | None":
        """Return a run or a workflow group in pods; None if it is not there, or not any more."""
        order, job_id = pod_order(run_dir, group), job_of(run_dir, group)
        return cls(run_dir, order, job_id) if order is not None and job_id is not None else None

    @property
    def folder(self) -> str:
        """Return the folder of its own files here."""
        group = self.order.group
        return self.run_dir.path if group is None else self.run_dir.group(group).path

    @property
    def result(self) -> str:
        """Return the path of its result here."""
        group = self.order.group
        return self.run_dir.result if group is None else self.run_dir.group(group).result

    def argv(self, port: int, command: str) -> list[str]:
        """Return what runs a command in a pod, by a port here that leads to its pod server."""
        return [*call_argv(self.run_dir.secret, port), "127.0.0.1", command]

    def first_pod(self) -> Pod | None:
        """Return the newest of its first pods; None if there is none.

        Raises:
            EngineError: The cluster can't be queried.
        """
        return find_pod(self.job_id, self.order.index)


def ask(argv: Sequence[str], data: bytes = b"") -> str:
    """Return what a kubectl command printed, given this input.

    Raises:
        NotAllowedError: The cluster forbids it.
        EngineError: It failed.
    """
    said = ask_patiently(argv, data, _ASK_S)
    if said.status == 0:
        return said.stdout.decode(errors="replace")
    late = "context deadline exceeded" if said.status is None else ""
    raise refused(argv, said.stderr.decode(errors="replace") or late)


def refused(argv: Sequence[str], stderr: str) -> EngineError:
    """Return the error for what kubectl or the cluster refused, with the reason."""
    report = DIALECT.explain_refusal(stderr)
    kind = NotAllowedError if "(Forbidden)" in stderr or "is forbidden" in stderr else EngineError
    where, why = " ".join(argv), "\n".join(report.because)
    return kind(report.error, where=where, why=why, fix=report.hint)


def create(job_id: str, made: object) -> None:
    """Create an object in a job's namespace.

    Raises:
        EngineError: The cluster refuses.
    """
    ask(kubectl_for(job_id, "create", "-f", "-"), json.dumps(made).encode())


def find_pod(job_id: str, index: int) -> Pod | None:
    """Return the newest pod of a place; None if there is none.

    Raises:
        EngineError: The cluster can't be queried.
    """
    run = _pods_of(job_id, f",{INDEX_LABEL}={index}")
    return run.newest().get(index) if run is not None else None


def find_pods(job_id: str) -> tuple[Pod, ...]:
    """Return all pods of a run, including ended ones, in order of creation.

    Raises:
        EngineError: The cluster can't be queried.
    """
    run = _pods_of(job_id)
    return run.pods if run is not None else ()


def _pods_of(job_id: str, more: str = "") -> PodsOfRun | None:
    name = place_of(job_id)[2]
    words = ("get", "pods", "-l", f"{RUN_LABEL}={name}{more}", "-o", "json")
    return runs_of(read_objects(ask(kubectl_for(job_id, *words)))).get(name)


def log_of(job_id: str, pod: Pod, *more: str) -> str:
    """Return a pod's log, or what `more` options of `kubectl logs` choose of it.

    Raises:
        EngineError: The cluster can't be queried.
    """
    words = ("logs", f"pod/{pod.name}", f"--container={CONTAINER}", *more)
    return ask(kubectl_for(job_id, *words))


@dataclass(slots=True)
class LastingCommand:
    """A kubectl command without a time limit, and what it prints; it ends with this process."""

    argv: list[str]
    child: proc.Child
    out: int
    errors: int

    @classmethod
    def start(cls, argv: Sequence[str], *, hears_errors: bool = True) -> Self:
        """Start it; of what is read by nobody, a full pipe would hold it up.

        Raises:
            MusterError: It can't be started.
        """
        argv = [word for word in argv if not word.startswith("--request-timeout")]
        read_out, write_out = os.pipe2(os.O_CLOEXEC)
        read_errors, write_errors = os.pipe2(os.O_CLOEXEC)
        try:
            words = proc.node_program("dies_with_parent", *argv)
            stderr = write_errors if hears_errors else proc.NOWHERE
            child = proc.start(words, stdout=write_out, stderr=stderr)
        except MusterError:
            os.close(read_out)
            os.close(read_errors)
            raise
        finally:
            os.close(write_out)
            os.close(write_errors)
        return cls(argv, child, read_out, read_errors)

    def stderr(self) -> str:
        """Return what it has printed as errors by now."""
        os.set_blocking(self.errors, False)
        try:
            return os.read(self.errors, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            return ""

    def close(self) -> None:
        """Forget what it prints."""
        for fd in {self.out, self.errors} - {-1}:
            os.close(fd)
        self.out = self.errors = -1


@dataclass(slots=True)
class PortForward:
    """A local port on the loopback that leads to a port of a pod."""

    port: int
    command: LastingCommand  # for its line per connection: it dies of a closed pipe

    def close(self) -> None:
        """Close it."""
        self.command.child.send_signal(15)
        self.command.child.wait(_LATE_S)
        self.command.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def forward(job_id: str, pod: str, port: int, limit_s: float = _FORWARD_S) -> PortForward:
    """Forward a local port to a pod's port within `limit_s`.

    Raises:
        NotAllowedError: The user may not.
        EngineError: It fails.
    """
    words = ("port-forward", f"pod/{pod}", f":{port}", "--address=127.0.0.1")
    command = LastingCommand.start(kubectl_for(job_id, *words))
    said = bytearray()
    deadline = time.monotonic() + (
        min(limit_s, _LOOK_FORWARD_S) if has_limited_questions() else limit_s
    )
    while (found := _LINE.search(said)) is None:
        data = _read(command.out, deadline)
        if not data:
            command.child.send_signal(15)
            command.child.wait(_LATE_S)
            stderr = command.stderr() or "timed out waiting for the connection"
            command.close()
            raise refused(command.argv, stderr)
        said += data
    return PortForward(int(found[1]), command)


def _read(fd: int, deadline: float) -> bytes:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return b""
    return os.read(fd, 4096)


# Changes of the pods of runs, with one request for all runs of a namespace.
#
# A process and a connection for each run would be too many for a workflow; kubectl alone takes 50
# MB. While pods start, about five lines come for each; they are reported at most once a second, as
# a change leads to an API request.


_AGAIN_S = 5.0
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

    Attributes:
        number: The number of changes so far.
        changed_at: When the last change was reported, by the monotonic clock.
    """

    def __init__(self, job_id: str, say: Callable[[str], None] = lambda _: None) -> None:
        self.say = say
        self._place = place_of(job_id)
        self._changed = threading.Condition()
        self.number = 0
        self.changed_at = 0.0

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
            self._changed.wait_for(lambda: self.number != seen, timeout_s)

    def wake(self) -> None:
        """End all waits, as a change does."""
        with self._changed:
            self.number += 1
            self.changed_at = time.monotonic()
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
        command = LastingCommand.start(kubectl(self.context, self.namespace, *words))
        self._child = command.child
        if self._stopping.is_set():
            self._child.send_signal(15)
        try:
            self._tell_lines(command.out)
            self._child.wait(_LATE_S)
            stderr = command.stderr()
        finally:
            command.close()
        return refused(command.argv, stderr) if stderr else None

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
