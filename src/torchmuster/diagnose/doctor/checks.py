"""The form of a check: the facts that it examines, the problem, and the message.

Most checks are rows of tables: a node has a problem (`Check`), or nodes differ in a value that
should be equal (`Equal`). A row is called like a rule function. What rows and functions say is in
`checks.txt`.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Any

from torchmuster.diagnose.doctor.show import NodeView, Situation, differ, has, names_of
from torchmuster.diagnose.finding import Finding, Level
from torchmuster.launcher.files.paragraphs import Paragraph, read_paragraphs

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckText:
    """What a check says: a paragraph of `checks.txt`.

    `error`, `because` and `hint` may contain `{nodes}`, `{has}` (has or have), and the names of
    other values.

    Attributes:
        of: The part of the facts; empty for what a function says.
        what: The name of a value that should be equal, as in `n3 has torch 2.6.0`; may be empty.
    """

    of: str = ""
    cause: str = ""
    level: Level = Level.NOTE
    error: str
    because: tuple[str, ...] = ()
    hint: str | None = None
    weight: int = 0
    is_certain: bool = False
    what: str = ""

    def finding(
        self,
        nodes: Sequence[str],
        *,
        level: Level | None = None,
        at: str | None = None,
        **words: object,
    ) -> Finding:
        """Return the finding.

        Args:
            nodes: Those that have the problem.
            level: How bad it is, if that depends on something.
            at: The place, if it is not just the nodes.
            **words: Values by name.
        """
        names = {"nodes": names_of(nodes), "has": has(nodes), **words}
        return Finding(
            level=level or self.level,
            cause=self.cause,
            error=self.error.format_map(names),
            at=at or names_of(nodes) or None,
            because=tuple(line for text in self.because for line in _lines_of(text, names)),
            hint=self.hint.format_map(names) if self.hint is not None else None,
            is_certain=self.is_certain,
            weight=self.weight,
        )


def _lines_of(text: str, names: Mapping[str, object]) -> list[str]:
    """Return the lines of one text of evidence; a list in a placeholder gives a line per entry."""
    listed = names.get(text.strip("{}"))
    return listed if isinstance(listed, list) else [text.format_map(names)]


def _text_of(paragraph: Paragraph) -> CheckText:
    return CheckText(
        of=paragraph.one("of"),
        cause=paragraph.one("cause"),
        level=Level(paragraph.one("level", "note")),
        error=paragraph.one("error"),
        because=tuple(paragraph.fields.get("because", ())),
        hint=paragraph.one("hint") or None,
        weight=int(paragraph.one("weight", "0")),
        is_certain=paragraph.one("certain") == "yes",
        what=paragraph.one("what"),
    )


TEXTS: Mapping[str, CheckText] = {
    paragraph.name: _text_of(paragraph)
    for paragraph in read_paragraphs(os.path.join(os.path.dirname(__file__), "checks.txt"))
}


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
