"""Preemption: a signal or a time limit becomes one step at which all ranks stop, saved.

No collective and no traffic in a quiet step. A thread in each rank listens; when any rank is asked
to stop, it says so in the store, and then

    each rank     promises a ceiling: a boundary it will not pass before the decision. That is the
                  boundary it stands at (waiting for data, or evaluating), or the next one
    the last      rank to promise takes the highest ceiling as the decision: no rank has passed it,
                  all can reach it
    each rank     stops at that boundary

A rank that has reached its ceiling waits. The others do not need it before they reach theirs,
because the ceilings differ by one at most and the decision is the higher one. A rank whose run has
ended promises a ceiling that no rank reaches: then the others continue to their own end.

Boundaries are numbered along the run: the end of a step and the end of an epoch are one each.

Ctrl-C and a closed terminal request a stop like SIGTERM; a second Ctrl-C ends the process as usual.
"""

import ctypes
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import contract
from torchmuster.core.model.links import may_be_followed
from torchmuster.core.model.ranks import name_ranks
from torchmuster.train.group import DEFAULT_TIMEOUT_S, WorldError

# Loader workers ignore the signals that ask the run to stop, and die with their parent.
#
# A stop signal usually goes to the whole process group. If it ended a loader worker, the save would
# fail too (KempnerForge 177). So the signals are blocked while workers are forked, and ignored in
# them.


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def fork_quietly() -> Iterator[None]:
    """Block the stop signals in the body, so that a child forked there starts with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_quietly(then: Callable[[int], None] | None, worker_id: int) -> None:
    """Ignore the stop signals in a new loader worker, then call the user's `worker_init_fn`."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if then is not None:
        then(worker_id)


TIME_IS_UP = "the time limit is near"
_DEADLINE_MARGIN_S = 60.0
_LOOK_EVERY_S = 10.0
_POLL_S = 0.2
_SAY_AFTER_S = 5.0
# These may be ignored on purpose: by a shell for background jobs, or by nohup.
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
_ONE_KEY_S = 1.0  # one Ctrl-C may arrive twice: from the terminal and from a launcher
_PREFIX = "muster/stop"
_NEVER = 1 << 62  # the ceiling of a rank whose run has ended

_listening: "StopWatch | None" = None


class TimeLimit:
    """When to stop without a signal: before the run's own limit or the end of the Slurm job.

    The margin covers the time that a save takes.

    Args:
        limit_s: The limit of the run.
        watches_job: This rank watches the end of the job, for all ranks.
    """

    def __init__(self, limit_s: float | None, *, watches_job: bool = True) -> None:
        self._limit_s = limit_s
        self._began_at = _began_at()
        # Source: https://slurm.schedmd.com/sbatch.html, SLURM_JOB_END_TIME, seconds since 1970.
        slurm = os.environ.get("SLURM_JOB_END_TIME", "") if watches_job else ""
        self._job_ends_at = float(slurm) if slurm.isdecimal() else None
        self._look_at = 0.0

    def deadline(self, last_save_s: float) -> float | None:
        """Return the time, as of `time.time()`; None without a limit."""
        least_s = 3 * last_save_s
        margin_s = max(_DEADLINE_MARGIN_S, least_s)
        limits = []
        if self._limit_s is not None:
            margin_s = max(min(margin_s, self._limit_s / 4), least_s)
            limits.append(self._began_at + self._limit_s)
        if self._job_ends_at is not None:
            limits.append(self._end_of_job(self._job_ends_at, margin_s))
        return min(limits) - margin_s if limits else None

    def _end_of_job(self, ends_at: float, margin_s: float) -> float:
        """Return the end of the job; near it, check the record for a move by the scheduler."""
        now = time.time()
        if now >= max(ends_at - margin_s, self._look_at):
            self._look_at = now + _LOOK_EVERY_S
            recorded = recorded_end_of_job()
            self._job_ends_at = ends_at = recorded if recorded is not None else ends_at
        return ends_at


def _began_at() -> float:
    """Return when the run began: under muster before its first attempt."""
    run_dir = os.environ.get(contract.RUN_DIR_VARIABLE)
    try:
        return os.stat(RunDir(run_dir).plan).st_mtime if run_dir else time.time()
    except OSError:
        return time.time()


def recorded_end_of_job() -> float | None:
    """Return the end of the job that the run's owner recorded last; None without one."""
    run_dir = os.environ.get(contract.RUN_DIR_VARIABLE)
    recorded = None
    with (
        suppress(OSError, ValueError, KeyError, TypeError),
        open(RunDir(run_dir or "").events, errors="replace") as record,
    ):
        for line in record:
            if '"event":"time_limit"' in line:
                recorded = float(json.loads(line)["ends_at"])
    return recorded


def how_to_go_on(folder: str) -> str:
    """Return how to continue a run that has stopped with a snapshot in this folder."""
    disk = os.environ.get("MUSTER_POD_DISK")
    if disk is not None and folder.startswith(f"{disk}/"):
        return "on this pod's own disk, which goes with the pod"
    run_dir = os.environ.get(contract.RUN_DIR_VARIABLE)
    if run_dir and may_be_followed(atomic.read_json(RunDir(run_dir).links)):
        return "the next job of the run continues from it, if its time was up"
    if run_dir and not _is_one_of_many_commands(run_dir):  # its record says where it has saved
        return f"`muster restart {short_id(os.path.basename(run_dir))}` goes on from it"
    return "start it again to continue"


def _is_one_of_many_commands(run_dir: str) -> bool:
    """Say whether `muster torchrun` was started by hand on several machines.

    Then only the same commands start the run again.
    """
    own = os.environ.get("TORCHELASTIC_RUN_ID") == os.path.basename(run_dir)
    return not own and os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


class StopNow(BaseException):
    """Raised in the main thread while it waits for data; no Exception, so no handler catches it."""


class StopWatch:
    """Listens for requests to stop, and agrees with the other ranks on the boundary.

    Attributes:
        reason: Why the run stops; empty until it is decided.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        deadline: Callable[[], float | None],
        say: Callable[[str], None],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        poll_s: float = _POLL_S,
    ) -> None:
        """Store the arguments.

        Args:
            store: A separate connection: the thread and the loop must not wait for each other.
            rank: The rank of this process.
            world_size: Number of ranks.
            deadline: Returns the time (`time.time()`) at which to stop without a signal, or None.
            say: Called with a line to print.
            timeout_s: How long a rank at its ceiling waits for the others' promises.
            poll_s: Interval at which the thread reads the store.
        """
        self.reason = ""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._deadline = deadline
        self._say = say
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._lock = threading.Condition()
        self._boundary = 0
        self._parked = False
        self._interruptible = False
        self._ceiling: int | None = None
        self._decision: int | None = None
        self._is_deaf = False  # the store is gone: nothing can be agreed any more
        self._request = ""
        self._published = False
        self._interrupted_at: float | None = None
        self._over = threading.Event()
        self._old_handlers: dict[int, Any] = {}
        self._old_wakeup_fd = -1
        self._wakeup_r, self._wakeup_w = -1, -1
        self._thread = threading.Thread(target=self._listen, name="muster-stop", daemon=True)

    def begin(self, boundary: int, *, signals: tuple[int, ...] = STOP_SIGNALS) -> None:
        """Start listening before `boundary`; to signals only if called from the main thread."""
        global _listening
        self._boundary = boundary - 1
        self._wakeup_r, self._wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for signum in signals:
            if signum in _MAY_BE_IGNORED and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._old_handlers[signum] = signal.signal(signum, self._take_signal)
        if self._old_handlers:
            _listening = self
            # The C part of the handler writes here at once, even if the main thread is in a
            # collective.
            self._old_wakeup_fd = signal.set_wakeup_fd(self._wakeup_w, warn_on_full_buffer=False)
        self._thread.start()

    def close(self) -> None:
        """Restore the signal handlers; after a decision to stop, ignore the signals to the end.

        A request to all ranks may arrive when this one is already exiting.
        """
        global _listening
        if self._wakeup_r < 0:
            return
        with self._lock:  # no signal of our own thread may arrive after its handler is gone
            self._over.set()
            stops = self.decided_here
        os.write(self._wakeup_w, b"\0")
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_wakeup_fd)
            for signum, handler in self._old_handlers.items():
                signal.signal(signum, signal.SIG_IGN if stops else handler or signal.SIG_DFL)
            _listening = None
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():  # otherwise it reads the pipe when the store lets it go
            os.close(self._wakeup_r)
            os.close(self._wakeup_w)
        self._wakeup_r = -1

    def forget(self) -> None:
        """Reset in a forked child: its signals are not requests to the run."""
        signal.set_wakeup_fd(-1)
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler or signal.SIG_DFL)

    def request(self, reason: str) -> None:
        """Ask all ranks to stop, from any thread."""
        self._request = self._request or reason

    # The main thread.

    def must_stop(self, boundary: int) -> bool:
        """Record that `boundary` is reached; return whether all ranks stop here.

        Waits for the decision if this boundary is the ceiling that was promised.

        Raises:
            WorldError: The other ranks promised nothing within the time-out.
        """
        with self._lock:
            self._boundary = boundary
            self._parked = False
            if self._must_wait():
                self._wait_for_decision()
            return self._decision is not None and boundary >= self._decision

    def _must_wait(self) -> bool:
        is_open = self._decision is None and not self._is_deaf
        return is_open and self._ceiling is not None and self._boundary >= self._ceiling

    def _wait_for_decision(self) -> None:
        began, said = time.monotonic(), False
        while self._must_wait():
            self._lock.wait(1.0)
            waited_s = time.monotonic() - began
            if not said and waited_s > _SAY_AFTER_S:
                said = True
                self._say("stopping: waiting for the ranks that are behind")
            if waited_s > self._timeout_s and self._must_wait():
                raise self._name_missing()

    def _name_missing(self) -> WorldError:
        missing: list[int] = []
        with suppress(RuntimeError):
            ranks = range(self._world_size)
            missing = [r for r in ranks if not self._store.check([_ceiling_key(r)])]
        who = name_ranks(missing) if missing else "the store"
        return WorldError(
            f"the ranks did not agree on where to stop within {self._timeout_s:g} s",
            where=f"rank {self._rank}, after {self.reason}",
            why=f"{who} did not answer",
        )

    @contextmanager
    def parked(self, *, interruptible: bool) -> Iterator[None]:
        """Context in which the main thread waits at the last boundary that it reached.

        Call `unpark` after it: a rank may not continue while its promise to wait holds.
        """
        with self._lock:
            self._parked = True
        self._interruptible = interruptible
        try:
            yield
        finally:
            self._interruptible = False
            with self._lock:  # a given promise stays; a new one is for the next boundary
                self._parked = False

    @property
    def decided_here(self) -> bool:
        """Whether all ranks stop at the current boundary."""
        return self._decision is not None and self._boundary >= self._decision

    def unpark(self) -> bool:
        """Leave the boundary, e.g. for a collective; return True if all ranks stop here instead."""
        return self.must_stop(self._boundary)

    def _take_signal(self, signum: int, frame: Any) -> None:
        if signum == signal.SIGINT and self._insists(time.monotonic()):
            raise KeyboardInterrupt
        if self._interruptible and self.decided_here:
            self._interruptible = False
            raise StopNow
        if self._decision is not None:
            return  # from our own thread a moment too late, or one more request
        self._request = self._request or signal.Signals(signum).name
        old = self._old_handlers.get(signum)
        if callable(old) and old is not signal.default_int_handler:
            old(signum, frame)

    def _insists(self, now: float) -> bool:
        """Return whether this is a second Ctrl-C: the first one requested a stop with a save."""
        if self._interrupted_at is None:
            self._interrupted_at = now
        return now - self._interrupted_at > _ONE_KEY_S

    # The thread.

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the main thread handles them
        try:
            while not self._over.is_set() and self._decision is None:
                self._look()
                self._read_wakeups()
            self._leave()
        except RuntimeError:  # the store is gone, and the attempt with it
            pass
        finally:
            with self._lock:
                self._is_deaf = self._decision is None
                self._lock.notify_all()
        self._wake_main()

    def _read_wakeups(self) -> None:
        if self._decision is not None or self._over.is_set():
            return
        ready, _, _ = select.select([self._wakeup_r], [], [], self._poll_s)
        if ready:
            for number in os.read(self._wakeup_r, 64):
                if number in STOP_SIGNALS:
                    self._request = self._request or signal.Signals(number).name

    def _look(self) -> None:
        deadline = self._deadline()
        if deadline is not None and time.time() >= deadline:
            self.request(TIME_IS_UP)
        if self._request and not self._published:
            self._published = True
            self._store.compare_set(
                f"{_PREFIX}/request", "", f"{self._request} on rank {self._rank}"
            )
        if self._ceiling is None and self._store.check([f"{_PREFIX}/request"]):
            self.reason = self._store.get(f"{_PREFIX}/request").decode()
            self._promise()
        if self._ceiling is not None and self._store.check([f"{_PREFIX}/decision"]):
            self._take_decision()

    def _promise(self) -> None:
        with self._lock:
            self._ceiling = self._boundary if self._parked else self._boundary + 1
        self._say(f"stopping at the next boundary that all ranks can reach: {self.reason}")
        self._publish(self._ceiling)

    def _leave(self) -> None:
        """Publish that this rank's run is over: later requests must not wait for it."""
        if self._ceiling is None:
            with self._lock:
                self._ceiling = _NEVER
            self._publish(_NEVER)

    def _publish(self, ceiling: int) -> None:
        """Publish our ceiling; the last rank to do so makes the decision."""
        self._store.set(_ceiling_key(self._rank), str(ceiling))
        if self._store.add(f"{_PREFIX}/promises", 1) == self._world_size:
            keys = [_ceiling_key(rank) for rank in range(self._world_size)]
            highest = max(int(self._store.get(key)) for key in keys)
            self._store.set(f"{_PREFIX}/decision", str(highest))

    def _take_decision(self) -> None:
        decision = int(self._store.get(f"{_PREFIX}/decision"))
        if decision == _NEVER:
            self._say("not stopping: a rank's run has ended already")
        with self._lock:
            self._decision = decision
            self._lock.notify_all()

    def _wake_main(self) -> None:
        """Interrupt a wait for data; repeatedly, because one signal may come too early."""
        while not self._over.wait(self._poll_s):
            with self._lock:
                if self.decided_here and self._interruptible and not self._over.is_set():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def _ceiling_key(rank: int) -> str:
    return f"{_PREFIX}/ceiling/{rank}"


def _forget_in_child() -> None:
    """Restore default handlers in a forked child, whose signals are not requests to the run."""
    global _listening
    watch, _listening = _listening, None
    if watch is not None:
        watch.forget()


os.register_at_fork(after_in_child=_forget_in_child)
