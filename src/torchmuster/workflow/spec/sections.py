"""Split a workflow file into its top-level sections, before Jinja and YAML see it.

The format splits by lines: a section begins at a `key:` in the first column. So muster can read
`default-values:` before it renders the rest, and a `key:` in the first column is never part of a
text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.core.model.text import did_you_mean
from torchmuster.core.spec.problems import Problems
from torchmuster.launcher.spec.source import Source

KNOWN = ("workflow", "default-values", "version")
# Keys of the level below, which a fragment of a file has at its top level.
_BELOW = ("groups", "tasks", "name", "resources", "timeout", "labels", "pool")
_MAX_REPORTED = 20  # problems of one kind
_KEY = re.compile(r"""(["']?)([A-Za-z_][\w.-]*)\1[ \t]*:(?=[ \t\r]|$)""")
_BLOCK = re.compile(r"[|>][-+0-9]{0,2}[ \t]*(#.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One top-level key and the lines up to the next.

    Attributes:
        line: The line of its key, from 1.
    """

    name: str
    line: int
    text: str


def split_sections(source: Source, problems: Problems) -> dict[str, Section]:
    """Return the known sections; report unknown and repeated keys as problems."""
    lines = to_lines(source.text)
    starts = _key_lines(lines)
    _check_preface(source, lines[: starts[0] if starts else len(lines)], problems)
    found: dict[str, Section] = {}
    unknown: list[tuple[str, int]] = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        name = _name(lines[start])
        if name not in KNOWN:
            unknown.append((name, start))
        elif name in found and len(problems.found) < _MAX_REPORTED:
            what = f"the top-level key `{name}` occurs twice"
            why = f"the first one is in line {found[name].line}"
            problems.add(what, f"{source.path}:{start + 1}", why, _indent_fix(lines, start))
        elif name not in found:
            text = "\n".join(lines[start:end])
            found[name] = Section(name=name, line=start + 1, text=text)
    if "workflow" in found:
        _report_unknown(source, lines, unknown, problems)
    else:
        _report_missing(source, lines, unknown, problems)
    return found


def to_lines(text: str) -> list[str]:
    """Return the lines as Jinja and YAML count them; a final newline begins no line."""
    lines = re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff"))
    return lines[:-1] if not lines[-1] else lines


def _name(line: str) -> str:
    match = _KEY.match(line)
    return match[2] if match else ""


def _key_lines(lines: Sequence[str]) -> list[int]:
    """Return the indices of lines that begin a section; skip unknown keys in `{#...#}`."""
    last_end = max((index for index, line in enumerate(lines) if "#}" in line), default=-1)
    found: list[int] = []
    is_comment = False
    for index, line in enumerate(lines):
        if _KEY.match(line) and (not is_comment or _name(line) in KNOWN):
            found.append(index)
        opened, closed = line.rfind("{#"), line.rfind("#}")
        if opened != closed:
            is_comment = opened > closed and index < last_end
    return found


def _check_preface(source: Source, lines: Sequence[str], problems: Problems) -> None:
    for index, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith(("#", "%YAML")) or text == "---":
            continue
        if text.startswith("{#") and text.endswith("#}"):
            continue
        what = "text before the first section would be dropped"
        fix = "move it below `workflow:`"
        if "{%" in text:
            why = "Jinja sees only the text below `workflow:`, so a `{% set %}` here has no effect"
            problems.add(what, f"{source.path}:{index + 1}", why, fix)
        elif any(_KEY.match(line) for line in to_lines(source.text)):
            why = f"`{text[:60]}` does not belong to any key"
            problems.add(what, f"{source.path}:{index + 1}", why, fix)
        return


def _report_unknown(
    source: Source, lines: Sequence[str], unknown: Sequence[tuple[str, int]], problems: Problems
) -> None:
    for name, start in unknown[:_MAX_REPORTED]:
        fix = _indent_fix(lines, start) or did_you_mean(name, KNOWN)
        if fix is None and name in _BELOW:
            fix = f"indent `{name}:` to put it under `workflow:`"
        why = f"the top-level keys are {', '.join(KNOWN)}"
        what = f"`{name}` is not a top-level key"
        problems.add(what, f"{source.path}:{start + 1}:1", why, fix)


def _report_missing(
    source: Source, lines: Sequence[str], unknown: Sequence[tuple[str, int]], problems: Problems
) -> None:
    names = [name for name, _ in unknown]
    inner = [name for name in names if name in _BELOW]
    if inner:
        where = f"{source.path}:{dict(reversed(unknown))[inner[0]] + 1}"
        missing = "put it under `workflow:`"
        if "name" not in names:
            missing += " with a `name:`"
        shown = " and ".join(f"`{name}:`" for name in inner[:3])
        verb = "is" if len(inner) == 1 else "are"
        what = f"{shown} {verb} at the top level, and there is no `workflow:`"
        problems.add(what, where, "this is a part of a workflow file", missing)
        return
    _report_unknown(source, lines, unknown, problems)
    near = any(did_you_mean(name, ["workflow"]) for name in names[:_MAX_REPORTED])
    if not near:
        fix = "workflow:\n  name: my-run\n  tasks: ..."
        if source.path.endswith(".py"):
            fix = f"muster run {source.path}"
        problems.add("there is no top-level key `workflow:`", source.path, fix=fix)


def _indent_fix(lines: Sequence[str], start: int) -> str | None:
    """Return a hint to indent a key that seems to belong to the text block above it."""
    for index in range(start - 1, max(-1, start - 200), -1):
        line = lines[index]
        if line[:1] in ("", " ", "\t") and _BLOCK.search(line):
            return f"indent it: the text that begins in line {index + 1} ends where a line is not"
        if _KEY.match(line) and _name(line) in KNOWN:
            return None
    return None
