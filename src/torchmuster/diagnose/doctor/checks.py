"""The form of a check: the facts that it examines, the problem, and the message.

Most checks are rows of tables: a node has a problem (`Check`), or nodes differ in a value that
should be equal (`Equal`). A row is called like a rule function.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torchmuster.diagnose.doctor.show import NodeView, Situation, differ, has, names_of
from torchmuster.diagnose.finding import Finding, Level

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


def _nothing(_: NodePart) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The fields that both kinds of checks share.

    `error`, `because` and `hint` may contain `{nodes}`, `{has}` (has or have), `{node.name}` and
    `{facts...}` of the first node, and the placeholders that `words` returns for it.

    Attributes:
        of: The part of the facts.
        when: Situations in which the check applies.
    """

    of: str
    cause: str
    error: str
    because: tuple[str, ...] = ()
    hint: str | None = None
    weight: int = 0
    is_certain: bool = False
    when: Callable[[Situation], bool] = _always

    def finding(self, level: Level, nodes: Sequence[str], words: Mapping[str, Any]) -> Finding:
        names = {"nodes": names_of(nodes), "has": has(nodes), **words}
        return Finding(
            level=level,
            cause=self.cause,
            error=self.error.format_map(names),
            at=names_of(nodes),
            because=tuple(line for text in self.because for line in _lines_of(text, names)),
            hint=self.hint.format_map(names) if self.hint is not None else None,
            is_certain=self.is_certain,
            weight=self.weight,
        )


def _lines_of(text: str, names: Mapping[str, Any]) -> list[str]:
    """Return the lines of one text of evidence; a list in a placeholder gives a line per entry."""
    listed = names.get(text.strip("{}"))
    return listed if isinstance(listed, list) else [text.format_map(names)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(_Row):
    """A possible problem of a node: one finding for all nodes that have it at the same level.

    Attributes:
        level: The level, or a function that returns it for a node; None means no problem.
        bad: Whether a node has the problem; without it the level decides.
        words: More placeholders and their values.
        worst: Fill the placeholders from the node with the lowest value instead of the first.
        each: Each node gets its own finding.
    """

    level: Level | Callable[[NodePart], Level | None]
    bad: Callable[[NodePart], bool] | None = None
    words: Callable[[NodePart], Mapping[str, Any]] = _nothing
    worst: Callable[[NodePart], float] | None = None
    each: bool = False

    def __call__(self, situation: Situation) -> Iterator[Finding]:
        """Yield the findings."""
        groups: dict[tuple[Level, str], list[NodePart]] = {}
        for seen in look(situation, self.of) if self.when(situation) else ():
            if self.bad is not None and not self.bad(seen):
                continue
            level = self.level if isinstance(self.level, Level) else self.level(seen)
            if level is not None:
                groups.setdefault((level, seen.node.name if self.each else ""), []).append(seen)
        for (level, _), group in groups.items():
            first = min(group, key=self.worst) if self.worst is not None else group[0]
            words = {"node": first.node, "facts": first.facts, **self.words(first)}
            yield self.finding(level, [seen.node.name for seen in group], words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equal(_Row):
    """A value that should be equal on all nodes; `{text}` lists the values by node.

    Attributes:
        value: The value of a node; None when it has none.
        what: The value's name, as in `n3 has torch 2.6.0`; may be empty.
        show: Converts a value to text.
    """

    level: Level
    value: Callable[[NodePart], Hashable | None]
    what: str = ""
    show: Callable[[Any], str] = str

    def __call__(self, situation: Situation) -> Iterator[Finding]:
        """Yield the difference."""
        seen = look(situation, self.of) if self.when(situation) else []
        values = {s.node.name: value for s in seen if (value := self.value(s)) is not None}
        found = differ(values, self.what, self.show)
        if found is not None:
            yield self.finding(self.level, found.odd, {"text": found.text})
