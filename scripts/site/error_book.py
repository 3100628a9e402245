"""The error book: a page for each cause that `muster explain` knows, made from its catalogue and rules.

People look for the message that they see. So a page has its wordings as they are printed, as far as an expression tells: what
changes from case to case stands as `...`.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from by_cause import CONFIRM, CURE, MEANING

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.entry import Row, Telling
from torchmuster.diagnose.explain.catalogue.index import CATALOGUE, RULE_ROWS
from torchmuster.diagnose.explain.causes import CAUSES
from torchmuster.diagnose.explain.end_of_run import render_verdict
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.finding import Confidence
from torchmuster.diagnose.logs.sources import read_logs

FOLDER = "errors"
INCIDENTS = Path(__file__).resolve().parents[2] / "tests" / "incidents"
MOST_EXAMPLES = 2
_MOST_TRIED = 5  # incidents of a cause
_BLIND = "blind"  # a set that nobody who writes rules may look at
GROUPS = (
    ("The scheduler", "time-limit", "node-setup"),
    ("Starting", "wrong-processor", "config-refused"),
    ("Launch and rendezvous", "launcher-on-too-few-nodes", "ranks-never-joined"),
    ("Addresses and networks", "port-taken", "network-table-full"),
    ("GPUs", "duplicate-gpu", "cuda-after-fork"),
    ("The node and its files", "node-crashed", None),
)
_CHANGES = "..."
_TELLS = {
    Telling.PROVES: "this message names the cause itself",
    Telling.NAMES: "this message names what went wrong",
    Telling.HINTS: "this message alone does not tell the cause",
    Telling.ECHO: "others print this when somebody has gone",
}
# What a sentence of the catalogue says of a case, where there is no case.
_WORDS = {
    "who": "a rank",
    "here": "the node",
    "words": "the message",
    "why": "REASON",
    "of_path": "of the path",
    "one": "NAME",
    "s": "",
}


@dataclass(slots=True)
class _Chapter:
    """What is known of one cause."""

    cause: str
    sentence: str
    messages: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)


def pages() -> dict[str, str]:
    """Return the pages of the book in Markdown, by their paths below the docs: an index, and one for each cause."""
    chapters = {cause: _Chapter(cause, sentence) for cause, sentence in CAUSES.items()}
    for row in CATALOGUE.by_name.values():
        if row.cause:
            chapters[row.cause].messages.append(row)
    for row in RULE_ROWS.values():
        chapters[row.cause].rows.append(row)
    _add_examples(chapters)
    made = {f"{FOLDER}/{cause}.md": _page(chapter) for cause, chapter in chapters.items()}
    return {f"{FOLDER}/index.md": _index(chapters.values()), **made}


def _add_examples(chapters: dict[str, _Chapter]) -> None:
    """Show what explain says of logs that are kept as incidents, where it is right and sure."""
    tried: dict[str, int] = {}
    for path in sorted(INCIDENTS.glob("*/expect.json")):
        expected = json.loads(path.read_text())
        chapter = chapters.get(expected["cause"])
        if chapter is None or expected["set"] == _BLIND or len(chapter.examples) >= MOST_EXAMPLES:
            continue
        tried[chapter.cause] = tried.get(chapter.cause, 0) + 1
        if tried[chapter.cause] <= _MOST_TRIED and (said := _explained(path.parent, chapter.cause)):
            chapter.examples.append(f"{_origin(expected['from'])}:\n\n```text\n{said}\n```\n")


def _explained(folder: Path, cause: str) -> str | None:
    files = [str(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    logs = [path for path in files if os.path.basename(path) != "expect.json"]
    verdict = judge(Case(read_logs(logs, year=2026)))
    first = verdict.first
    if first is None or first.cause != cause or first.confidence is Confidence.LOW:
        return None
    return render_verdict(verdict, None).replace(f"{folder}{os.sep}", "").strip()


def _origin(text: str) -> str:
    return "A reconstructed log" if text == "reconstructed" else _capital(text.rstrip("."))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def readable(wording: str) -> str:
    """Return a regular expression as a message of the kind that it fits; what changes stands as `...`."""
    text = "".join(_texts(parser.parse(wording)))
    text = re.sub(r"(?:\.\.\.[\s.]*)+\.\.\.", _CHANGES, text)
    return re.sub(r"\s+", " ", text).strip()


def _texts(parts: Sequence[Any]) -> Iterator[str]:
    for code, value in parts:
        if code is codes.LITERAL:
            yield chr(value)
        elif code is codes.IN and len(value) > 1 and value[0][0] is codes.LITERAL:
            yield chr(value[0][1])  # [Ff]ailed, [ -]
        elif code is codes.SUBPATTERN:
            yield from _texts(value[3])
        elif code is codes.BRANCH:
            yield from _texts(value[1][0])
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            yield from _repeated(*value)
        elif code not in (codes.AT, codes.ASSERT, codes.ASSERT_NOT):
            yield _CHANGES


def _repeated(least: int, most: int, parts: Sequence[Any]) -> Iterator[str]:
    only = parts[0][0] if len(parts) == 1 else None
    if only in (None, codes.SUBPATTERN, codes.LITERAL):
        if least or most == 1:
            yield from _texts(parts)
    elif only is codes.IN and parts[0][1] == [(codes.CATEGORY, codes.CATEGORY_SPACE)]:
        yield " "
    elif least or most > 1:
        yield _CHANGES


def _index(chapters: Iterable[_Chapter]) -> str:
    by_cause = {chapter.cause: chapter for chapter in chapters}
    names = list(by_cause)
    lines = [
        "# Error book",
        "",
        "Messages of PyTorch jobs and what is behind them: one page for each cause that `muster explain` knows. Search for the words",
        "that you see, or let `muster explain LOG` find the first cause, also in jobs that muster did not start.",
        "",
    ]
    for title, first, last in GROUPS:
        end = names.index(last) + 1 if last is not None else len(names)
        lines += [f"## {title}", "", "| cause | |", "|---|---|"]
        for name in names[names.index(first) : end]:
            lines.append(f"| [{name}]({name}.md) | {by_cause[name].sentence} |")
        lines.append("")
    return "\n".join(lines)


def _page(chapter: _Chapter) -> str:
    lines = [
        "---",
        f'description: "{chapter.sentence.replace(chr(34), chr(39))}: messages, how to confirm it, what helps"',
        "---",
        "",
        f"# {_capital(_sentence(chapter.sentence))}",
        "",
        f"`{chapter.cause}` is the word for it in what `muster explain --json` prints.",
        "",
    ]
    if chapter.examples:
        lines += ["## As `muster explain` says it", "", *chapter.examples]
    for message in sorted(chapter.messages, key=lambda message: -(message.tells or 0)):
        lines += _message(message)
    if chapter.rows:
        lines += ["## Found by what several lines show" if chapter.messages else "## Found by", ""]
        for row in _different(chapter.rows):
            lines += _finding(row.error, row.hint, row.confirm, row.hint_in)
    lines += _of_cause(chapter.cause, lines)
    rivals = {rival for message in chapter.messages for rival in message.rivals}
    rivals |= {rival for row in chapter.rows for rival in row.rivals}
    if rivals := rivals - {chapter.cause}:
        lines += ["## Looks the same", ""]
        lines += [f"- [{name}]({name}.md): {CAUSES[name]}" for name in sorted(rivals)]
        lines.append("")
    lines += [
        "## Which of them is it?",
        "",
        "`muster explain LOG ...` reads the logs of all ranks and names the first cause, with the lines that prove it",
        "([how far to trust it](../explain.md#how-far-to-trust-it)).",
        "",
    ]
    return "\n".join(lines)


def _of_cause(cause: str, above: list[str]) -> list[str]:
    """Return what the messages above do not say of their cause: what it means, how to confirm it, what helps."""
    text = "\n".join(above)
    told = {"What it means": MEANING, "Cure": CURE, "Confirm": CONFIRM}
    lacking = {
        title: words[cause]
        for title, words in told.items()
        if f"- **{title}" not in text and cause in words
    }
    if not lacking:
        return []
    lines = ["## In general", ""]
    for title, words in lacking.items():
        command, blanks, where = words.partition("   ")
        is_command = title == "Confirm" and not words.startswith("nothing to confirm")
        shown = f"`{command}`" if is_command else command
        lines.append(f"- **{title}**: {shown}{f' {where}' if blanks else ''}")
    return [*lines, ""]


def _different(rows: Iterable[Row]) -> list[Row]:
    """Return rows of which no two say the same."""
    return list({(row.error, row.hint): row for row in rows}.values())


def _message(message: Row) -> list[str]:
    wordings = dict.fromkeys(readable(wording) for wording in message.says)
    shown = [f"    {wording}" for wording in wordings if wording.strip(" .")]
    tells = _TELLS.get(message.tells or Telling.NOISE, "")
    return [
        f"## {_title(next(iter(wordings)))}",
        "",
        *shown,
        "",
        f"{message.source}{f'; {tells}' if tells else ''}.",
        "",
        *_finding(message.error, message.hint, message.confirm, message.hint_in),
    ]


def _finding(error: str, advice: str, confirm: str | None, more: Any) -> list[str]:
    rows = [("What it means", error), ("Cure", advice)]
    rows += [(f"Cure ({name.replace('_', ' ')})", text) for name, text in _plain(more)]
    lines = [f"- **{title}**: {_sentence(text)}" for title, text in rows if text]
    if confirm:
        command, _, where = confirm.partition("   ")
        lines.append(f"- **Confirm**: `{_words(command)}`{f' {_words(where)}' if where else ''}")
    return [*lines, ""]


def _plain(more: Any) -> Iterator[tuple[str, str]]:
    """Yield the advice for surroundings that needs no value of the log."""
    for name, given in more.items():
        for text in given:
            if name != "anywhere" and not re.search(r"\{\w+\}", text):
                yield name, text
                break


def _title(wording: str) -> str:
    return _words(wording.strip(" .:").replace("`", "'"))[:90] or "message"


def _sentence(text: str) -> str:
    """Return a sentence as Markdown: outside of code, nothing in it is a mark of Markdown."""
    parts = _words(text).split("`")
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"([\\*_<>\[\]{}|#])", r"\\\1", parts[number])
    return "`".join(parts)


def _words(text: str) -> str:
    """Return a sentence of the catalogue without a case: its fields are placeholders as in a command line."""

    def word(found: re.Match[str]) -> str:
        names = re.findall(r"\{(\w+)", found[0])
        name = names[0].rstrip("0123456789")
        return _WORDS.get(name, name.upper())

    # Of fields that stand side by side one has a value: each belongs to another wording.
    said = re.sub(r"(?<!\{)(?:\{\w+[^{}]*\})+(?!\})", word, text)
    return said.replace("{{", "{").replace("}}", "}")
