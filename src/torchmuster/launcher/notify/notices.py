"""Which events of a record are worth a notice. Nothing here waits, reads or sends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.files.layout import short_id
from torchmuster.core.model import events
from torchmuster.core.model.events import Stamped
from torchmuster.core.model.narration import narrate
from torchmuster.core.model.text import span

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
            case events.WorkflowStartedEvent() | events.SweepStartedEvent():
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
            case events.HangEvent(rank=rank, node=node):
                name = f"hang-{event.attempt}-{rank}"
                what = " ".join(filter(None, (event.text, event.sentence)))
                stacks = f"muster stacks {short_id(self.run_id)}"
                return self._once(
                    name, "hang", at, what, cause=event.text, rank=rank, node=node, next=stacks
                )
            case events.StartWaitEvent(text=text):
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
