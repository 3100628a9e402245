"""Find the agent of the rank or the node that `muster exec` names: `rank 3`, or `node n2`."""

from collections.abc import Callable
from typing import Protocol

from torchmuster.core.head.membership import Member
from torchmuster.core.model.ranks import NodeRanks
from torchmuster.core.model.text import name_alone, nearest


class RunningAttempt(Protocol):
    """The part of an attempt that is read here."""

    members: dict[int, Member]
    ranks: dict[int, NodeRanks]


class NamedAgents:
    """The agents of a run, by the names that clients use.

    Args:
        attempt: Returns the newest attempt; None before the first.
        name: Returns the name of a member.
    """

    def __init__(
        self, attempt: Callable[[], RunningAttempt | None], name: Callable[[Member], str]
    ) -> None:
        self._attempt = attempt
        self._name = name

    def find(self, word: str) -> Member | None:
        """Return the connected agent of the rank or node; None if there is none."""
        attempt = self._attempt()
        kind, _, name = word.partition(" ")
        if attempt is None:
            return None
        for place, member in attempt.members.items():
            if not member.is_present:
                continue
            ranks = attempt.ranks[place]
            if kind == "node" and name in (
                self._name(member),
                name_alone(self._name(member)),
                member.hello.host,
            ):
                return member
            index = int(name) - ranks.first_rank if kind == "rank" and name.isdecimal() else -1
            if 0 <= index < ranks.num_workers:
                return member
        return None

    def why_not(self, word: str) -> tuple[str, str | None]:
        """Return why `find` returned None, and what the run has instead."""
        attempt = self._attempt()
        kind, _, name = word.partition(" ")
        if attempt is None:
            return "no worker of the run has started yet", None
        if kind == "node":
            names = [self._name(member) for member in attempt.members.values()]
            near = nearest(name, names)
            known = f"did you mean {near}?" if near else f"its nodes: {', '.join(names[:12])}"
            return f"the run has no node `{name}` now", known
        total = sum(ranks.num_workers for ranks in attempt.ranks.values())
        return f"the run has no rank {name} now", f"it has ranks 0 to {total - 1}"
