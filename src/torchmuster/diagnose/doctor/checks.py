"""The form of a check: the facts that it examines, the problem, and the message.

Most checks are rows of tables: a node has a problem (`Check`), or nodes differ in a value that
should be equal (`Equal`). A row is called like a rule function. What rows and functions say is in
`checks.txt`.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Any

from torchmuster.diagnose.doctor.show import NodeView, Situation, differ
from torchmuster.diagnose.finding import CheckText, Finding, Level, read_texts

LONG = attrgetter("is_long")
MACHINES = attrgetter("has_machines")


@dataclass(frozen=True, slots=True)
class NodePart:
    """One part of a node's facts."""

    situation: Situation
    node: NodeView
    facts: Any


def look(situation: Situation, part: str) -> list[NodePart]:
    """Return one part of the facts, for all nodes that have reported it."""
    found = [(node, getattr(node.facts, part, None)) for node in situation.known]
    return [NodePart(situation, node, facts) for node, facts in found if facts is not None]


def _always(_: Situation) -> bool:
    return True


def _nothing(_: NodePart) -> Mapping[str, object]:
    return {}


TEXTS = read_texts(os.path.join(os.path.dirname(__file__), "checks.txt"))


@dataclass(frozen=True, slots=True)
class Check:
    """A possible problem of a node: one finding for all nodes that have it at the same level.

    Attributes:
        text: What it says; its placeholders may also be `{node.name}` and `{facts...}` of the first
            node, and what `words` returns for it.
        level: Returns the level for a node, if that depends on it; None means no problem.
        bad: Whether a node has the problem; without it the level decides.
        when: Situations in which the check applies.
        words: More placeholders and their values.
        worst: Fill the placeholders from the node with the lowest value instead of the first.
        each: Each node gets its own finding.
    """

    text: CheckText
    _: KW_ONLY
    level: Callable[[NodePart], Level | None] | None = None
    bad: Callable[[NodePart], bool] | None = None
    when: Callable[[Situation], bool] = _always
    words: Callable[[NodePart], Mapping[str, object]] = _nothing
    worst: Callable[[NodePart], float] | None = None
    each: bool = False

    def __call__(self, situation: Situation) -> Iterator[Finding]:
        """Yield the findings."""
        groups: dict[tuple[Level, str], list[NodePart]] = {}
        for seen in look(situation, self.text.of) if self.when(situation) else ():
            if self.bad is not None and not self.bad(seen):
                continue
            level = self.level(seen) if self.level is not None else self.text.level
            if level is not None:
                groups.setdefault((level, seen.node.name if self.each else ""), []).append(seen)
        for (level, _), group in groups.items():
            first = min(group, key=self.worst) if self.worst is not None else group[0]
            words = {"node": first.node, "facts": first.facts, **self.words(first)}
            yield self.text.finding([seen.node.name for seen in group], level=level, **words)


@dataclass(frozen=True, slots=True)
class Equal:
    """A value that should be equal on all nodes; `{text}` lists the values by node.

    Attributes:
        text: What it says.
        value: The value of a node; None when it has none.
        when: Situations in which the check applies.
        show: Converts a value to text.
    """

    text: CheckText
    _: KW_ONLY
    value: Callable[[NodePart], Hashable | None]
    when: Callable[[Situation], bool] = _always
    show: Callable[[Any], str] = str

    def __call__(self, situation: Situation) -> Iterator[Finding]:
        """Yield the difference."""
        seen = look(situation, self.text.of) if self.when(situation) else []
        values = {s.node.name: value for s in seen if (value := self.value(s)) is not None}
        found = differ(values, self.text.what, self.show)
        if found is not None:
            yield self.text.finding(found.odd, text=found.text)
