"""What was asked to end: the run, or nodes of an elastic run, such as a spot machine that is called back. Rules only.

A node's SIGTERM stops the run where the run needs that node; where a range leaves enough others, or another node will come in
its place, only that node goes: its workers get the signal and their grace, then the attempt ends, no restart is spent, and the
next one continues without it, or when its replacement is there.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.head.membership import Member
from torchmuster.model import contract
from torchmuster.model.failure import EndKind, WorkerEnd
from torchmuster.model.plan import RunPlan
from torchmuster.model.record.events import StoppingEvent
from torchmuster.model.stop import StopCause, better_cause

_BETTER_WORD_S = 1.0  # from an agent's signal to the word of an owner who knows more


@dataclass(slots=True)
class StopRequest:
    """A stop of the whole run.

    Attributes:
        asked_at: When it was asked for.
        sent: The workers have been sent the signal.
        killed: Their grace is over.
    """

    signum: int
    cause: StopCause
    kill_at: float
    asked_at: float
    sent: bool = False
    killed: bool = False

    def is_settled(self, now: float) -> bool:
        """Say whether nobody will say better any more who asked: with a lost node an agent's signal comes before its owner's word."""
        is_unsure = self.cause is StopCause.NODE_LOST and now < self.kill_at
        return not is_unsure or now >= self.asked_at + _BETTER_WORD_S

    def told(self, grace_s: float, *, by_torchrun: bool) -> StoppingEvent:
        """Return the event that says who stops the run, and how; `muster torchrun` counts one Ctrl-C more."""
        name, who = contract.signal_name(self.signum), self.cause.value
        text = f"{who} asked to stop: {name} goes to every worker, SIGKILL after {grace_s:.0f} s"
        if self.signum == signal.SIGINT:
            text += f" or {'a third' if by_torchrun else 'a second'} Ctrl-C"
        return StoppingEvent(signal=name, who=who, text=text)

    def is_known_better(self, cause: StopCause) -> bool:
        """Take a second word on who asked for this stop; say whether it was news."""
        before, self.cause = self.cause, better_cause(self.cause, cause)
        return self.cause is not before


@dataclass(slots=True)
class Leavers:
    """Who leaves."""

    plan: RunPlan
    members: list[Member] = field(default_factory=list)
    _kill_at: float = float("inf")

    def may_leave(self, member: Member, signum: int, present: Sequence[Member]) -> bool:
        """Say whether the run can go on without this node and those that leave already."""
        if signum != signal.SIGTERM or member.hello.wants_place_0:
            return False
        if self.plan.nodes_return:
            return True
        if not self.plan.is_elastic:
            return False
        rest = [m for m in present if m is not member and m not in self.members]
        return len(rest) >= max(self.plan.min_nodes, 1)

    def add(self, member: Member, now: float) -> None:
        """Note that a node leaves."""
        self.members.append(member)
        self._kill_at = min(self._kill_at, now + self.plan.limits.grace_s)

    def is_time(self, now: float, ends: Sequence[WorkerEnd], names: Sequence[str]) -> bool:
        """Say whether the attempt ends now; workers that leave with code 75 take the others with them."""
        if not self.members:
            return False
        kinds = (EndKind.SUCCESS, EndKind.PREEMPTED)
        has_ended = any(end.node in names and end.kind not in kinds for end in ends)
        return has_ended or now >= self._kill_at

    def take_all(self) -> list[Member]:
        """Return who leaves, and forget them."""
        members, self.members, self._kill_at = self.members, [], float("inf")
        return members
