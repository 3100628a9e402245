"""Values for a workflow file: `--set`, `--set-string`, `--set-env` and `default-values:`.

Numbers are parsed as in the format (`07` is 7, `1e3` is 1000.0); `true`, `false`, lists and maps
are recognised. Nothing is evaluated.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core.spec.problems import Problems
from torchmuster.errors import UsageError
from torchmuster.launcher.model.tokens import BARE_KINDS
from torchmuster.launcher.spec.source import parse_yaml

TOKEN_NAMES = frozenset({*BARE_KINDS, "input", "host"})
RESERVED = frozenset(
    [
        "and",
        "or",
        "not",
        "in",
        "is",
        "if",
        "else",
        "for",
        "true",
        "false",
        "none",
        "True",
        "False",
        "None",
        "loop",
        "self",
    ]
)
_BOOLS = {"true": True, "false": False, "True": True, "False": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A name in `default-values:`.

    Attributes:
        help: The comment after the value, or on the lines above it; empty without one.
        line: Its line in the file, from 1.
    """

    name: str
    value: Any
    help: str
    line: int


def parse_sets(words: Sequence[str], problems: Problems) -> dict[str, Any]:
    """Parse the values of `--set NAME=VALUE ...`; the last one counts if a name is given twice."""
    found: dict[str, Any] = {}
    for name, text in _pairs(words, "--set", problems):
        try:
            found[name] = _value(text)
        except (ValueError, RecursionError) as error:
            what = f"`{text[:80]}` begins like a JSON list or map but is not valid JSON"
            fix = f"--set-string {name}=... keeps it as text"
            problems.add(what, f"--set {name}=...", _short(error), fix)
    return found


def parse_set_strings(words: Sequence[str], problems: Problems) -> dict[str, Any]:
    """Parse the values of `--set-string NAME=VALUE ...`, which are always text."""
    return dict(_pairs(words, "--set-string", problems))


def default_values(text: str, name: str, first_line: int, problems: Problems) -> list[Default]:
    """Parse a section `default-values:`.

    Args:
        text: The section, including the line of its key.
        name: The file's name for messages.
        first_line: The line of the file where the section begins, from 1.
        problems: Receives the problems.
    """
    try:
        document = parse_yaml(text, name, lambda line, column: (line + first_line - 1, column))
    except UsageError as error:
        why = error.why
        if "{{" in text or "{%" in text:
            why = f"{why}; default-values are read before Jinja, so they can't hold unquoted Jinja"
        problems.add(error.what, error.where, why, error.fix)
        return []
    for again in document.twice:
        problems.add(again.what, again.where, again.why)
    values = document.value.get("default-values") if isinstance(document.value, dict) else None
    if values is None:
        return []
    if not isinstance(values, dict):
        where = document.where(("default-values",))
        fix = "default-values:\n  n_nodes: 2"
        problems.add("`default-values` is not a map of names to values", where, fix=fix)
        return []
    lines = text.split("\n")
    found = []
    for key, value in values.items():
        path = ("default-values", key)
        line = document.keys[path][0]
        if not isinstance(key, str):
            problems.add(f"`{key}` is not a name", document.where(path, at_key=True))
            continue
        comment = _comment(lines, line - 1)
        found.append(Default(name=key, value=value, help=comment, line=line + first_line - 1))
    return found


def check_name(name: str) -> str | None:
    """Return why a name can't be used in a template; None if it can."""
    if name in RESERVED:
        return "the word is reserved in Jinja"
    if not (name.isidentifier() and name.isascii()):
        return "names consist of letters, digits and `_` and don't begin with a digit"
    return None


def _pairs(words: Sequence[str], option: str, problems: Problems) -> Iterator[tuple[str, str]]:
    for word in words:
        name, equals, text = word.partition("=")
        where = f"{option} {name}"
        if not equals:
            problems.add(f"`{name}` has no value", where, fix=f"{option} {name}=VALUE")
        elif name in TOKEN_NAMES:
            what = f"`{name}` is the name of a token and can't be set"
            problems.add(what, where, f"`{{{{{name}}}}}` gets its value when a task starts")
        elif why := check_name(name):
            problems.add(
                f"`{name}` is not a valid name of a value", where, why, _better_name(name, option)
            )
        else:
            yield name, text


def _better_name(name: str, option: str) -> str | None:
    first, dot, rest = name.partition(".")
    if dot and first.isidentifier() and rest.isidentifier():
        return f"set the whole map: --set '{first}={{\"{rest}\": ...}}'"
    mended = re.sub(r"\W", "_", name, flags=re.ASCII)
    if check_name(mended) is None:
        return f"{option} {mended}=..., with `{mended}` in the file"
    return None


def _value(text: str) -> Any:
    if text in _BOOLS:
        return _BOOLS[text]
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if number in (float("inf"), float("-inf")) and "inf" not in text.lower():
            return text  # such as thousands of digits
        return number
    if text[:1] in ("[", "{") and not text.startswith(("{{", "{%")):
        return json.loads(text)
    return text


def _short(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _comment(lines: Sequence[str], index: int) -> str:
    """Return the comment after the value that begins in a line, else the one above it."""
    trailing = _trailing_comment(lines[index])
    if trailing:
        return trailing
    above: list[str] = []
    for line in reversed(lines[1:index]):
        if not line.lstrip().startswith("#"):
            break
        above.append(line.strip().lstrip("#").strip())
    return " ".join(reversed(above)).strip()


def _trailing_comment(line: str) -> str:
    quote = ""
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote and line[index - 1] != "\\" else quote
        elif character in "'\"" and line[:index].rstrip()[-1:] in (":", "[", "{", ",", ""):
            quote = character
        elif character == "#" and line[index - 1 : index] in (" ", "\t"):
            return line[index + 1 :].strip()
    return ""
