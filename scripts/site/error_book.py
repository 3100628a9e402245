"""The error book: a page for each cause that `muster explain` knows, made from its catalogue and rules.

People paste the message that they see into the search, and have no time. So a page's title is the message that most of them see,
and the page begins with the cure (`pages.txt`). Title, cure, meaning, proof and wordings stand above the first heading: the search
takes each heading's text for a document of its own, and weighs the first one most. What changes in a message from case to case
stands as `...`.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from by_cause import CONFIRM, CURES_OF, MEANING, MEANINGS_OF

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import CATALOGUE, CAUSES, RULE_ROWS, Row, Telling
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.own_run import render_verdict
from torchmuster.diagnose.finding import Confidence
from torchmuster.diagnose.logs import read_logs
from torchmuster.launcher.files.paragraphs import Paragraph, read_paragraphs

FOLDER = "errors"
PAGES = Path(__file__).with_name("pages.txt")
INCIDENTS = Path(__file__).resolve().parents[2] / "tests" / "incidents"
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
_NUMBER = "N"
_DIGITS = [(codes.CATEGORY, codes.CATEGORY_DIGIT)]
_LONGEST = 90  # title of a message
_OPEN = " .:,=({'\""  # at the end of a title: what followed is left out
_TELLS = {
    Telling.PROVES: "this message names the cause itself",
    Telling.NAMES: "this message names what went wrong",
    Telling.HINTS: "this message alone does not tell the cause",
    Telling.ECHO: "others print this when somebody has gone",
}
# Surroundings in which another cure is better, as their names are written.
_SURROUNDINGS = {
    "container": "a container",
    "data-parallel": "nn.DataParallel",
    "deepspeed": "DeepSpeed",
    "kubernetes": "Kubernetes",
    "lightning": "Lightning",
    "megatron": "Megatron-LM",
    "notebook": "a notebook",
    "pbs": "PBS",
    "rocm": "ROCm",
    "sglang": "SGLang",
    "slurm": "Slurm",
    "tensorflow": "TensorFlow",
    "trainer": "the Trainer of transformers",
    "vllm": "vLLM",
}
# What a sentence of the catalogue says of a case, where there is no case; with nothing, it reads as well without.
_WORDS = {
    "callers": "the others",
    "device": "",
    "filter": "",
    "here": "the node",
    "host": "",
    "lost": "another rank",
    "missing": "a rank",
    "name": "",
    "of_path": "",
    "op": "a call",
    "path": "",
    "peer": "the peer",
    "port": "",
    "s": "",
    "taken": "",
    "target": "the address",
    "what": "",
    "who": "a rank",
}
_IN_COMMANDS = {"folder": "PATH", "asked": "NAME", "filter": "", "here": "the node"}
_SAYS_NOTHING = re.compile(r"a rank (?:on the node )?failed(?: first)?")
_FIELD = re.compile(r"(?<!\{)(?:\{\w+[^{}]*\})+(?!\})")


@dataclass(slots=True)
class _Chapter:
    """What is known of one cause."""

    cause: str
    sentence: str
    page: Paragraph
    messages: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    example: str = ""


def pages() -> dict[str, str]:
    """Return the pages of the book in Markdown, by their paths below the docs: an index, and one for each cause."""
    written = {page.name: page for page in read_paragraphs(str(PAGES))}
    chapters = {
        cause: _Chapter(cause, sentence, written[cause]) for cause, sentence in CAUSES.items()
    }
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
        if chapter is None or expected["set"] == _BLIND or chapter.example:
            continue
        tried[chapter.cause] = tried.get(chapter.cause, 0) + 1
        if tried[chapter.cause] <= _MOST_TRIED:
            chapter.example = _explained(path.parent, chapter.cause) or ""


def _explained(folder: Path, cause: str) -> str | None:
    files = [str(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    logs = [path for path in files if os.path.basename(path) != "expect.json"]
    verdict = judge(Case(read_logs(logs, year=2026)))
    first = verdict.first
    if first is None or first.cause != cause or first.confidence is Confidence.LOW:
        return None
    return render_verdict(verdict, None).replace(f"{folder}{os.sep}", "").strip()


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def readable(wording: str) -> str:
    """Return a regular expression as a message of the kind that it fits; what changes stands as `...`."""
    text = re.sub(r"\s+", " ", "".join(_texts(parser.parse(wording))))
    text = re.sub(r"(?:\.\.\.[\s.]*)+\.\.\.|\.{4,}", _CHANGES, text)
    return re.sub(r"^[\s.]+(?=\w)", "", text).strip()


def _texts(parts: Sequence[Any]) -> Iterator[str]:
    for code, value in parts:
        if code is codes.LITERAL:
            yield chr(value)
        elif code is codes.IN and value == _DIGITS:
            yield _NUMBER
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
        if least or (most == 1 and parts[0] != (codes.LITERAL, ord("-"))):  # no sign of a number
            yield from _texts(parts)
    elif only is codes.IN and parts[0][1] == _DIGITS:
        yield _NUMBER
    elif only is codes.ANY:
        yield f" {_CHANGES} "
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
        "Messages of PyTorch jobs and what helps: one page for each cause that `muster explain` knows. Search for the words",
        "that you see, or let `muster explain LOG` find the first cause, also in jobs that muster did not start.",
        "",
    ]
    for title, first, last in GROUPS:
        end = names.index(last) + 1 if last is not None else len(names)
        lines += [f"## {title}", "", "| message | cause |", "|---|---|"]
        for name in names[names.index(first) : end]:
            chapter = by_cause[name]
            lines.append(
                f"| [{_sentence(chapter.page.one('title'))}]({name}.md) | {_sentence(chapter.sentence)} |"
            )
        lines.append("")
    return "\n".join(lines)


def _page(chapter: _Chapter) -> str:
    cause, title = chapter.cause, chapter.page.one("title")
    messages = sorted(chapter.messages, key=lambda message: -(message.tells or 0))
    rows = _different(chapter.rows)
    wordings = [*chapter.page.fields.get("prints", ())]
    wordings += [readable(wording) for message in messages for wording in message.says]
    lines = [
        "---",
        f"description: {json.dumps(f'{title}: what to do, what it means, how to confirm it')}",
        "---",
        "",
        f"# {_sentence(title)}",
        "",
        chapter.page.one("do"),
        "",
        f"- **What it means**: {_sentence(MEANING.get(cause, chapter.sentence))}.",
        f"- **Confirm**: {_proof(CONFIRM.get(cause) or _confirm([*rows, *messages]))}",
        "",
    ]
    if shown := [f"    {wording}" for wording in dict.fromkeys(wordings) if wording.strip(" .")]:
        lines += ["Messages that lead here:", "", *shown, ""]
    cases = [row for row in rows if meaning(row) not in ("", chapter.sentence)]
    if messages or len(rows) > 1 or any(list(_plain(row)) for row in rows):
        lines += _more_cures([row for row in rows if row not in cases])
    else:
        cases = []  # its one cure is the page's first sentence
    for message in messages:
        lines += _message(message)
    for row in cases:
        lines += _case(row)
    return "\n".join([*lines, *_background(chapter, messages)])


def _background(chapter: _Chapter, messages: Iterable[Row]) -> list[str]:
    """Return what helps nobody in a hurry: the cause's word, an example, other causes, how to be sure."""
    lines = [
        "## Background",
        "",
        f"`{chapter.cause}` is this cause's word in `muster explain --json`.",
        "`muster explain LOG ...` reads the logs of all ranks and names the first cause, with the lines that prove it",
        "([how far to trust it](../explain.md#how-far-to-trust-it)).",
        "",
    ]
    if chapter.example:
        lines += ["An example of what it says:", "", "```text", chapter.example, "```", ""]
    rivals = {rival for row in (*messages, *chapter.rows) for rival in row.rivals}
    if rivals := rivals - {chapter.cause}:
        lines += ["These look the same:", ""]
        lines += [f"- [{name}]({name}.md): {_sentence(CAUSES[name])}" for name in sorted(rivals)]
        lines.append("")
    return lines


def _confirm(rows: Iterable[Row]) -> str:
    """Return the first command of rows that proves them, without a case; empty where none does."""
    found = next((row.confirm for row in rows if row.confirm), "")
    command, blanks, where = found.partition("   ")
    words = {**_IN_COMMANDS, "call": "that call"}
    return _fill(command, _IN_COMMANDS, str.upper) + blanks + _fill(where, words, str.upper)


def _proof(words: str) -> str:
    """Return a command that proves something as Markdown; where it is typed stands behind three blanks."""
    if words.startswith("nothing to confirm"):
        return words
    command, _, where = words.partition("   ")
    return f"`{command}`{f' {_sentence(where)}' if where else ''}"


def _different(rows: Iterable[Row]) -> list[Row]:
    """Return rows of which no two say the same."""
    return list({(row.error, row.hint): row for row in rows}.values())


def _message(message: Row) -> list[str]:
    """Return a message with the cure of its own."""
    wordings = dict.fromkeys(readable(wording) for wording in message.says)
    tells = _TELLS.get(message.tells or Telling.NOISE, "")
    return [
        f"## {_title(next(iter(wordings)))}",
        "",
        *_finding(message),
        f"- **Printed by**: {message.source}{f'; {tells}' if tells else ''}.",
        "",
    ]


def _more_cures(rows: Iterable[Row]) -> list[str]:
    """Return what helps in any case of the cause, and in which surroundings something else helps more."""
    findings = [line for row in rows for line in _finding(row, with_meaning=False)]
    return ["## More cures", "", *dict.fromkeys(findings), ""] if findings else []


def _case(row: Row) -> list[str]:
    """Return a case of the cause that a rule knows: what is special in it, and its cure."""
    finding = _finding(row, with_meaning=False)
    return [f"## {_sentence(_capital(meaning(row)))}", "", *finding, ""] if finding else []


def _finding(row: Row, *, with_meaning: bool = True) -> list[str]:
    cures = [("Cure", advice(row))]
    cures += [(f"Cure in {_SURROUNDINGS.get(name, name)}", text) for name, text in _plain(row)]
    lines = [f"- **{title}**: {_sentence(text)}" for title, text in cures if text]
    if with_meaning and (means := meaning(row)):
        lines.append(f"- **What it means**: {_sentence(means)}")
    if row.confirm:
        lines.append(f"- **Confirm**: {_proof(_confirm([row]))}")
    return lines


def _plain(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the advice for surroundings that needs no value of the log."""
    for name, given in row.hint_in.items():
        for text in given:
            if name != "anywhere" and (said := _without_case(text)):
                yield name, said
                break


def meaning(row: Row) -> str:
    """Return what a row says without a case; empty where nothing of use is left of it."""
    text = MEANINGS_OF.get(row.name, row.error)
    text = re.sub(r" *\([^()]*\{\w+\}[^()]*\)", "", text)  # (Xid {xid} of {bus})
    text = re.sub(r"(?::|, which says:?) *(?:\{\w+[^{}]*\})+$", "", text)
    said = _without_case(text)
    return "" if _SAYS_NOTHING.fullmatch(said) else said


def advice(row: Row) -> str:
    """Return what helps in what a row is about, without a case; empty where its own words need one."""
    return _without_case(CURES_OF.get(row.name, row.hint))


def _without_case(text: str) -> str:
    """Return a sentence with words for its fields; empty where a field has none."""
    fields = {name.rstrip("0123456789") for name in re.findall(r"(?<!\{)\{(\w+)", text)}
    return _fill(text, _WORDS) if fields <= _WORDS.keys() else ""


def _fill(text: str, words: Mapping[str, str], otherwise: Callable[[str], str] = str) -> str:
    def word(found: re.Match[str]) -> str:
        name = re.findall(r"\{(\w+)", found[0])[0].rstrip("0123456789")
        return words[name] if name in words else otherwise(name)

    # Of fields that stand side by side one has a value: each belongs to another wording.
    said = _FIELD.sub(word, text).replace("{{", "{").replace("}}", "}")
    # Where nothing stands in a field's place, its blank goes, too; three blanks set a command off.
    said = re.sub(r"(?<=\S)  (?=\S)", " ", said)
    return re.sub(r" +(?=[,;:)])(?!:\))", "", said).rstrip(" :,") if said != text else said


def _title(wording: str) -> str:
    text = wording.rstrip(_OPEN).replace("`", "'")
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rsplit(" ", 1)[0].rstrip(_OPEN)
    return _sentence(text) or "message"


def _sentence(text: str) -> str:
    """Return a sentence as Markdown: outside of code, nothing in it is a mark of Markdown."""
    parts = text.split("`")
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"([\\*_<>\[\]{}|#])", r"\\\1", parts[number])
    return "`".join(parts)
