"""The wait for the nodes of an attempt: when enough have joined, which are missing and why. Rules only."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.head.membership import MAX_LISTED, Member, Membership
from torchmuster.model.plan import RunPlan
from torchmuster.model.record.events import MissingNode, WaitingEvent
from torchmuster.model.verdict import Report

_MAX_NAMED = 8  # in a sentence


@dataclass(slots=True)
class Gathering:
    """Which nodes an attempt waits for.

    Attributes:
        since: When the wait began.
        enough_since: Since when the least number of nodes has been here; None while it is not.
        asked_for: The places of lost nodes, whose replacements have been asked for.
        start_failures: Why each place's last start brought no agent.
        gone: The places whose node is out of the job, by the scheduler's word: nobody can come.
    """

    plan: RunPlan
    members: Membership
    since: float
    enough_since: float | None = None
    asked_for: set[int] = field(default_factory=set)
    start_failures: dict[int, str] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def begin(self, now: float) -> None:
        """Wait from now on."""
        self.since, self.enough_since = now, None

    def end(self) -> None:
        """Wait no longer: an attempt starts, and only spare nodes may still come."""
        self.gone.intersection_update(self.members.missing_places())
        if self.plan.spares:
            self.asked_for.intersection_update(self.members.missing_places())
        else:
            self.asked_for.clear()

    @property
    def due(self) -> float | None:
        """Return when the last call for more nodes ends."""
        return (
            None if self.enough_since is None else self.enough_since + self.plan.limits.last_call_s
        )

    def start_failed(self, place: int, why: str, *, is_gone: bool) -> None:
        """Note why no agent could be started at a place; of a node that is gone the first reason stays beside it."""
        if place in self.gone:
            return
        first = self.start_failures.get(place)
        if is_gone:
            self.gone.add(place)
            why = f"{first}; {why}" if first is not None else why
        self.start_failures[place] = why

    @property
    def is_in_vain(self) -> bool:
        """Whether fewer nodes can come than the run needs."""
        may_come = set(self.members.missing_places()) - self.gone
        return len(self.members.present()) + len(may_come) < self.plan.min_nodes

    def left_s(self, now: float) -> float:
        """Return for how long nodes may still join: no longer when too few can, or those that are here and get no ranks are too many."""
        if self.gone and self.is_in_vain:
            return 0.0
        all_here = self.members.left_out() and not self.members.missing_places()
        if all_here and len(self.members.present()) < self.plan.min_nodes:
            return 0.0
        return self.since + self.plan.limits.join_timeout_s - now

    def is_complete(self, here: Sequence[Member], now: float, *, shrinking: bool) -> bool:
        """Say whether an attempt may start with these members.

        Args:
            here: Who is present.
            now: The time.
            shrinking: An attempt has run before: nobody is given time to come.
        """
        if len(here) >= self.plan.max_nodes:
            return self._has_its_own(here, now, shrinking=shrinking)
        if not self.plan.is_elastic or len(here) < self.plan.min_nodes:
            self.enough_since = None
            return False
        if not any(member.hello.wants_place_0 for member in here):
            return False  # the head's own agent always takes part
        if self.enough_since is None:
            self.enough_since = now
        limits = self.plan.limits
        is_late = now - self.since >= limits.join_timeout_s  # a longer last call ends too
        return shrinking or is_late or now - self.enough_since >= limits.last_call_s

    def _has_its_own(self, here: Sequence[Member], now: float, *, shrinking: bool) -> bool:
        """Say whether the nodes that were to get the ranks are here, or have had their time: else spare ones get them."""
        if not self.plan.spares:
            return True
        if not any(member.hello.wants_place_0 for member in here):
            return False
        if shrinking or all(
            place >= self.plan.max_nodes for place in self.members.missing_places()
        ):
            return True
        if self.enough_since is None:
            self.enough_since = now
        return now - self.enough_since >= self.plan.limits.last_call_s

    def lacks(self, *, is_last: bool = False) -> list[int]:
        """Return the places for which agents have to be started before the next attempt.

        Args:
            is_last: No attempt can follow the next one, so nobody would need spare nodes.
        """
        missing = self.members.missing_places()
        is_enough = len(self.members.present()) >= self.plan.min_nodes
        if is_enough and (is_last or self.plan.is_elastic):
            return []
        if self.plan.is_elastic:
            return missing
        return [place for place in missing if place not in self.asked_for]

    def missing(self, place: int) -> MissingNode:
        """Return the node of a place, and why it is missing."""
        why = "no agent has connected"
        if place in self.asked_for:
            why = "lost; a replacement has not connected"
        if place in self.start_failures:
            why = f"{why}: {self.start_failures[place]}"
        return MissingNode(node=self.plan.node_name(place), why=why)

    def wait(self, num_here: int, now: float, hint: str) -> WaitingEvent | None:
        """Return the event that names the nodes that are missing; None where something is left of the last attempt only."""
        wanted = self.plan.min_nodes  # of a fixed number that is all of them
        places = self.members.missing_places()[: wanted - num_here]
        if not places:
            return None
        missing = [self.missing(place) for place in places]
        return WaitingEvent(
            missing=tuple(missing[:MAX_LISTED]),
            num_missing=len(missing),
            wanted=wanted,
            left_s=round(self.left_s(now), 1),
            hint=hint,
        )

    def report(self, num_here: int) -> Report:
        """Return the report on a run whose nodes did not come within the limit."""
        limit_s = self.plan.limits.join_timeout_s
        if num_here >= self.plan.min_nodes:
            busy = [m for m in self.members.members if m.running_attempt is not None]
            return Report(
                error=f"all nodes have joined, but the next attempt could not start within {limit_s:.0f} s",
                because=tuple(
                    f"{self.members.name(m)}: its last workers may still run"
                    for m in busy[:_MAX_NAMED]
                ),
            )
        if left_out := [self.members.name(member) for member in self.members.left_out()]:
            return Report(
                error=f"only {num_here} of the {self.plan.min_nodes} nodes that the run needs may have ranks",
                at=", ".join(left_out[:_MAX_NAMED]),
                because=("it has computed something else than the others before",),
                hint="start the run on other nodes",
            )
        missing = [self.missing(place) for place in self.members.missing_places()][:_MAX_NAMED]
        came = f"came within {limit_s:.0f} s"
        hint = f"start the missing nodes, or wait longer: {self.plan.longer_wait}"
        if self.gone and self.is_in_vain:
            came, hint = "can come", "another job may get other nodes"
        return Report(
            error=f"only {num_here} of {self.plan.min_nodes} nodes {came}",
            at=", ".join(one.node for one in missing),
            because=tuple(f"{one.node}: {one.why}" for one in missing),
            hint=hint,
        )
