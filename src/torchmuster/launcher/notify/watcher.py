"""Which events of a record are worth a notice; the process that follows it and delivers them.

`python .../__main__.py notify --run-dir=FOLDER ...`: one runs on the client's machine. Where the run
is a batch job, another one runs next to its head, and goes first: the client's delivers what that
one can't, or has not in time. Nobody waits for either, and both remember in one file what has been
taken, so a restart repeats little. The end of its standard input is its last call, unless it stays:
it looks once more, and delivers for some seconds.
"""

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import Kind, RunDir, short_id
from torchmuster.core.model import codec, events
from torchmuster.core.model.events import Stamped
from torchmuster.core.model.narration import narrate
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import span
from torchmuster.core.owner.record import Follow, changed_at
from torchmuster.core.plainfile import open_own
from torchmuster.errors import MusterError
from torchmuster.launcher.model import events as parts
from torchmuster.launcher.notify.receivers import Receiver, Receivers, parse
from torchmuster.launcher.views.elsewhere import is_elsewhere

_MAX_TEXT = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNotice:
    """One message.

    Attributes:
        id: The same whenever it is sent again.
        kind: `attempt`, `hang`, `waiting`, `restart` or `end`.
        at: When it happened, in seconds since 1970.
        text: For people: what happened, the cure, and what to type next.
        facts: The rest of what a program gets.
    """

    id: str
    kind: str
    at: float
    text: str
    facts: Mapping[str, Any]

    def as_plain(self) -> dict[str, Any]:
        """Return it as what a receiver gets; `text` is what Slack and its likes show."""
        head = {"text": self.text, "id": self.id, "kind": self.kind, "at": round(self.at, 3)}
        return {**head, **self.facts}


@dataclass(slots=True)
class Notices:
    """Turns the events of one record into notices.

    Attributes:
        run_id: The run.
        host: The machine that tells of it.
        wait_s: How long it may wait without workers, in seconds.
        idle_since: Since when it has had none; None while it has, or where there are no workers.
    """

    run_id: str
    host: str
    wait_s: float
    idle_since: float | None
    _said: set[str] = field(default_factory=set)
    _waits: str = ""

    def hear(self, one: Stamped) -> list[RunNotice]:
        """Return the notices that an event is worth, none or one."""
        event, at = one.event, one.at
        match event:
            case events.WorkersStartedEvent():
                self.idle_since, self._waits = None, ""
            case events.StartedEvent():
                self.idle_since = None
            case events.WaitingEvent() | events.WaitingForEndEvent():
                self._waits = narrate(event) or ""
            case events.RunEndedEvent():
                self.idle_since = at  # another job may continue it
            case events.AttemptFailedEvent(attempt=attempt, restarts_left=left, cause=cause):
                self.idle_since = at
                self._said.add(f"why-{attempt}")
                if left is None:
                    return []  # the end follows
                rank, node = (cause.rank, cause.node) if cause is not None else (None, None)
                log = f"muster logs {short_id(self.run_id)} --rank {rank}" if cause else ""
                more = f"{left} restart{'s' if left != 1 else ''} left"
                return self._once(
                    f"attempt-{attempt}-failed",
                    "attempt",
                    at,
                    f"attempt {attempt} failed: {event.what}; {more}",
                    cause=event.what,
                    rank=rank,
                    node=node,
                    next=log or None,
                )
            case events.AttemptStartedEvent(attempt=attempt, why=why) if attempt > 0:
                if f"why-{attempt - 1}" not in self._said:
                    what = f"attempt {attempt} starts: {why}"
                    return self._once(f"attempt-{attempt}", "restart", at, what, cause=why)
            case parts.HangEvent(rank=rank, node=node):
                name = f"hang-{event.attempt}-{rank}"
                what = " ".join(filter(None, (event.text, event.sentence)))
                stacks = f"muster stacks {short_id(self.run_id)}"
                return self._once(
                    name, "hang", at, what, cause=event.text, rank=rank, node=node, next=stacks
                )
            case parts.StartWaitEvent(text=text):
                return self._once(f"start-{event.attempt}", "hang", at, text, cause=text)
        return []

    def look(self, now: float) -> list[RunNotice]:
        """Return the notice on a wait that has become too long, if it has."""
        since = self.idle_since
        if since is None or now - since < self.wait_s:
            return []
        why = self._waits or "its job has not started, or its workers have not"
        what = f"has waited for {span(now - since)} without workers: {why}"
        status = f"muster status {short_id(self.run_id)}"
        return self._once(f"waiting-{since:.0f}", "waiting", now, what, cause=why, next=status)

    def end(self, answer: Mapping[str, Any], at: float, number: int) -> RunNotice:
        """Return the notice on the end, from the answer that `--json` gives; `number` tells ends apart."""
        state, cause = answer["state"], answer["cause"]
        took = f" after {span(answer['elapsed_s'])}" if answer["elapsed_s"] is not None else ""
        what = f"{state}{took}" + (f": {cause}" if cause else "")
        known = ("cause", "rank", "node", "hint", "next", "state", "attempts", "elapsed_s")
        facts = {name: answer[name] for name in known}
        where = {"at": answer["at"]} if answer["at"] else {}
        return self._notice(f"end-{number}", "end", at, what, facts, where)

    def _once(self, name: str, kind: str, at: float, what: str, **facts: Any) -> list[RunNotice]:
        """Return a notice; [] if it was made before."""
        if name in self._said:
            return []
        self._said.add(name)
        return [self._notice(name, kind, at, what, facts, {})]

    def _notice(
        self,
        name: str,
        kind: str,
        at: float,
        what: str,
        facts: Mapping[str, Any],
        more: Mapping[str, str],
    ) -> RunNotice:
        lines = [f"muster: {short_id(self.run_id)} {what}"]
        lines += [f"{label}: {text}" for label, text in more.items()]
        lines += [f"{label}: {facts[label]}" for label in ("hint", "next") if facts.get(label)]
        return RunNotice(
            id=f"{self.run_id}/{name}",
            kind=kind,
            at=at,
            text="\n".join(lines)[:_MAX_TEXT],
            facts={"run": self.run_id, "host": self.host, **facts},
        )


# The process.


CLIENT, JOB = "client", "job"
LAST_CALL_S = 10.0
_POLL_S = 0.5
_STATE_S = 2.0
_CLUSTER_S = 60.0
_SECOND_S = 30.0
_TRY_LIMIT_S = 90.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 300.0
_GIVE_UP_S = 6 * 3600.0
_MAX_WAITING = 1000
_NICE = 10


@dataclass(slots=True)
class _Try:
    """One delivery in a thread, which a slow receiver may hold for as long as it likes."""

    notice: RunNotice
    began: float
    why: str | None = None

    def run(self, receiver: Receiver) -> None:
        self.why = receiver.deliver(self.notice.as_plain())


@dataclass(slots=True)
class Outbox:
    """What waits for one receiver; in order, one at a time.

    Attributes:
        why: Why the last try failed; empty if none did.
    """

    receiver: Receiver
    number: int
    waiting: deque[RunNotice] = field(default_factory=lambda: deque(maxlen=_MAX_WAITING))
    num_sent: int = 0
    why: str = ""
    _try: _Try | None = None
    _next_at: float = 0.0
    _pause_s: float = _FIRST_PAUSE_S

    def go_on(self, now: float, may_send: Callable[[RunNotice], bool]) -> RunNotice | None:
        """Begin or end a delivery; return a notice that was taken."""
        if (running := self._try) is not None:
            if running.why is None and now - running.began < _TRY_LIMIT_S:
                return None
            self._try = None
            why = running.why
            if why == "":
                self.why, self._pause_s = "", _FIRST_PAUSE_S
                self.num_sent += 1
                with contextlib.suppress(ValueError):
                    self.waiting.remove(running.notice)
                return running.notice
            self.why = why or f"it took more than {_TRY_LIMIT_S:.0f} s"
            self._next_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
        while self.waiting and now - self.waiting[0].at > _GIVE_UP_S and self.why:
            self.waiting.popleft()
        if self.waiting and now >= self._next_at and may_send(self.waiting[0]):
            self._try = _Try(self.waiting[0], now)
            threading.Thread(target=self._try.run, args=(self.receiver,), daemon=True).start()
        return None

    @property
    def is_done(self) -> bool:
        """Whether nothing waits."""
        return not self.waiting and self._try is None


class Watcher:
    """Follows one record.

    Args:
        run_dir: The folder of the record.
        receivers: Who gets notices.
        side: `client` or `job`.
    """

    def __init__(self, run_dir: RunDir, receivers: Receivers, side: str) -> None:
        self.run_dir, self.side = run_dir, side
        began = changed_at(run_dir.secret) or time.time()
        run_id, host = os.path.basename(run_dir.path), os.uname().nodename
        self._notices = Notices(run_id, host, receivers.wait_s, began)
        self._follow = Follow(run_dir.events)
        self._outboxes = [Outbox(receiver, n) for n, receiver in enumerate(receivers.all)]
        self._reach: dict[int, str] = {}
        self._shown: Any = None
        self._looked_at = 0.0
        self._has_ended = self._has_looked = False
        self._leave_at: float | None = None
        self._hurry, self._ends = threading.Event(), threading.Event()

    def run(self) -> None:
        """Follow the record until its end is delivered, or nobody is left whom this one is for."""
        threading.Thread(target=self._look_who_is_reached, daemon=True).start()
        self._show()
        while not self._is_over():
            self._has_looked = self._leave_at is not None
            taken = self._taken()
            for box in self._outboxes:
                box.waiting = deque(
                    (n for n in box.waiting if f"{box.number} {n.id}" not in taken),
                    _MAX_WAITING,
                )
            for notice in self._news():
                for box in self._outboxes:
                    if f"{box.number} {notice.id}" not in taken:
                        box.waiting.append(notice)
            for box in self._outboxes:
                done = box.go_on(time.time(), lambda n, box=box: self._may_send(box, n))  # type: ignore[misc]
                if done is not None:
                    self._note(box.number, done)
            self._show()
            self._hurry.wait(_POLL_S)
            self._hurry.clear()
        self._show(is_over=True)
        self._ends.set()

    def call_last(self) -> None:
        """Deliver what is due, but take no more than some seconds."""
        self._leave_at = time.monotonic() + LAST_CALL_S
        self._looked_at = 0.0  # the end may have been written just now
        self._hurry.set()

    # What is worth a notice.

    def _news(self) -> list[RunNotice]:
        found = [notice for one in self._follow.events() for notice in self._notices.hear(one)]
        if self._has_ended:
            return found
        now = time.time()
        found += self._notices.look(now)
        if (state := self._state(now)) is not None and state.is_final:
            from torchmuster.launcher.views.account import answer_of

            self._has_ended = True
            answer = answer_of(self.run_dir)
            ended_at = changed_at(self.run_dir.result) or now
            # A sweep and a workflow are continued in their own folders.
            number = answer["attempts"] if answer["kind"] == Kind.RUN.value else int(ended_at)
            found.append(self._notices.end(answer, now, number))
        return found

    def _state(self, now: float) -> RunState | None:
        """Return the state of the run; None if it was looked at a moment ago."""
        from torchmuster.launcher.model.run import RunRecord
        from torchmuster.launcher.views.find import view_run

        is_written = os.path.isfile(self.run_dir.result)
        pause_s = _CLUSTER_S if is_far(self.run_dir) and not is_written else _STATE_S
        is_inside = self.side == JOB and not is_written  # while we live, the job does
        if now - self._looked_at < pause_s or is_inside:
            return None
        self._looked_at = now
        # Only whether it has ended: that needs no record.
        return view_run(self.run_dir, RunRecord()).state

    # Who delivers.

    def _may_send(self, box: Outbox, notice: RunNotice) -> bool:
        """Say whether it is this process's turn: next to the head at once, else where that one can't."""
        late_s = time.time() - notice.at
        if self.side == JOB:
            return not self._reach.get(box.number) or late_s > 2 * _SECOND_S
        first = atomic.read_json(self._path(JOB))
        if not isinstance(first, dict) or first.get("over"):
            return True
        theirs = first.get("receivers")
        if isinstance(theirs, list) and len(theirs) > box.number and theirs[box.number].get("why"):
            return True
        return late_s > _SECOND_S

    def _look_who_is_reached(self) -> None:
        """Look at each receiver until it is reached: from then on, deliveries tell."""
        left = list(self._outboxes)
        while left:
            for box in left:
                try:
                    self._reach[box.number] = box.receiver.unreachable()
                except Exception as error:  # noqa: BLE001 - one address must not hide the others
                    self._reach[box.number] = type(error).__name__
            left = [box for box in left if self._reach[box.number]]
            self._ends.wait(_CLUSTER_S if left else 0)

    def _is_over(self) -> bool:
        done = all(box.is_done for box in self._outboxes)
        if self._leave_at is not None:
            left = (box for box in self._outboxes if not self._reach.get(box.number))
            done = all(box.is_done for box in left)  # the other side sends the rest
            return (done and self._has_looked) or time.monotonic() > self._leave_at
        return (self._has_ended and done) or not os.path.isdir(self.run_dir.path)

    # What is remembered.

    def _path(self, side: str) -> str:
        return os.path.join(self.run_dir.notifiers, f"{side}.json")

    def _taken(self) -> set[str]:
        try:
            with open_own(self.run_dir.notified) as file:
                return set(file.read().decode(errors="replace").splitlines())
        except OSError:
            return set()

    def _note(self, number: int, notice: RunNotice) -> None:
        with contextlib.suppress(OSError):  # it may be sent again, under the same id
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(self.run_dir.notified, flags, 0o600)
            try:
                os.write(fd, f"{number} {notice.id}\n".encode())
            finally:
                os.close(fd)

    def _show(self, *, is_over: bool = False) -> None:
        """Write down what is reached and what waits, for `muster status` and the other side."""
        shown = {
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "over": is_over,
            "receivers": [
                {
                    "to": box.receiver.label,
                    "sent": box.num_sent,
                    "waiting": len(box.waiting),
                    "why": box.why or self._reach.get(box.number, ""),
                }
                for box in self._outboxes
            ],
        }
        if shown != self._shown:
            self._shown = shown
            with contextlib.suppress(OSError):
                if not os.path.isdir(self.run_dir.notifiers):
                    os.mkdir(self.run_dir.notifiers, 0o700)  # not the run's own: it may be removed
                atomic.write_json(self._path(self.side), shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyOrder:
    """What the process is started with.

    Attributes:
        side: `client` or `job`.
        stays: It outlives what has started it.
    """

    run_dir: str
    side: str
    stays: bool = False


def main(arguments: list[str]) -> int:
    """Run the program `notify`."""
    order = codec.from_arguments(NotifyOrder, arguments)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # It goes on, to tell the end. Not SIG_IGN: the user's commands would inherit that.
        signal.signal(signum, lambda *_: None)
    run_dir = RunDir(order.run_dir)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with open_own(run_dir.notify) as file:
        receivers = parse(file.read().decode(), run_dir.notify)
    watcher = Watcher(run_dir, receivers, order.side)

    def hear_the_last_call() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 64):
                continue
        watcher.call_last()

    if not order.stays:
        threading.Thread(target=hear_the_last_call, daemon=True).start()
    watcher.run()
    return 0


def is_far(run_dir: RunDir) -> bool:
    """Say whether the run is on a cluster, and its state is known from here only by asking that."""
    return run_dir.has_jobs or is_elsewhere(run_dir)


@dataclass(frozen=True, slots=True)
class Started:
    """A process that delivers, and our end of its standard input."""

    child: proc.Child
    input_fd: int

    def last_call(self, *, waits: bool) -> None:
        """Tell it that we end; wait for it, with a limit."""
        with contextlib.suppress(OSError):
            os.close(self.input_fd)
        if waits:
            self.child.wait(LAST_CALL_S + 1)


def start(run_dir: RunDir, side: str, *, stays: bool = False) -> Started:
    """Start the process that delivers; it says nothing, and outlives what its starter cleans up."""
    order = NotifyOrder(run_dir=run_dir.path, side=side, stays=stays)
    words = proc.node_program("notify", *codec.to_arguments(order))
    out = proc.NOWHERE
    read_end, write_end = os.pipe()
    try:
        child = proc.start_spared(words, stdin=read_end, stdout=out, stderr=out)
    except MusterError:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return Started(child, write_end)


@contextlib.contextmanager
def notifying_inside(run_dir: RunDir) -> Iterator[None]:
    """Deliver notices of a run from inside its job; at the end, wait some seconds for the last."""
    started = None
    if os.path.exists(run_dir.notify):
        with contextlib.suppress(MusterError, OSError):  # the run is worth more
            started = start(run_dir, JOB)
    try:
        yield
    finally:
        if started is not None:
            started.last_call(waits=True)
