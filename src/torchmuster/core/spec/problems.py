"""Read user input: durations and sizes, and all problems at once, in options and in files by key path.

Durations and sizes are such as `30`, `10m`, `1.5h`, `1h30m`, `1:30:00`, `1-12`, `PT1H30M`, `64Gi`.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torchmuster.core.model.text import did_you_mean
from torchmuster.errors import ManyErrors, UsageError

KeyPath = tuple[str | int, ...]
Value = TypeVar("Value")


@dataclass(slots=True)
class Problems:
    """Collects errors, so that the user sees all of them at once."""

    found: list[UsageError] = field(default_factory=list)

    def add(
        self, what: str, where: str | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        """Add a problem."""
        self.found.append(UsageError(what, where=where, why=why, fix=fix))

    def checked(self, value: Value | None) -> Value:
        """Return the value if there are no problems.

        Raises:
            ManyErrors: All problems.
        """
        if self.found or value is None:
            raise ManyErrors(self.found)
        return value


def near_file(path: str, folder: str = ".", suffixes: Sequence[str] = ("",)) -> str | None:
    """Return a hint with the file that was probably meant."""
    above, name = os.path.split(path)
    try:
        names = os.listdir(os.path.join(folder, above))
    except OSError:
        return None
    below = next(
        (one for one in sorted(names) if os.path.isfile(os.path.join(folder, above, one, name))),
        None,
    )
    if below is not None and name:
        return f"did you mean `{os.path.join(above, below, name)}`?"
    hint = did_you_mean(name, [near for near in names if near.endswith(tuple(suffixes))])
    return hint and hint.replace("`", f"`{os.path.join(above, '')}", 1)


def parse_set_env(
    words: Sequence[str], problems: Problems, option: str = "--set-env"
) -> dict[str, str]:
    """Return the variables of `--set-env NAME=VALUE ...`; the value may contain `=`."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        where = f"{option} {name}"
        if not equals:
            problems.add(f"`{name}` has no value", where, fix=f"{where}=VALUE")
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            why = "names consist of letters, digits and `_` and don't begin with a digit"
            problems.add(f"`{name}` is not a valid name of an environment variable", where, why)
        elif "\0" in value:
            problems.add(f"the value of `{name}` contains a NUL byte", where)
        else:
            found[name] = value
    return found


_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|us|s|m|h|d|)")
_SECONDS = {"us": 1e-6, "ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COMPOUND = re.compile(r"(?:\d+(?:ms|us|s|m|h|d))+")
# As sbatch and qsub parse them: [H:]MM:SS and D-HH[:MM[:SS]]; only the first part may exceed its
# unit. Each form comes with the seconds of its parts.
_FORMS = (
    (re.compile(r"(\d{1,7}):([0-5]\d)", re.ASCII), (60, 1)),
    (re.compile(r"(\d{1,5}):([0-5]\d):([0-5]\d)", re.ASCII), (3600, 60, 1)),
    (
        re.compile(r"(\d{1,5})-([01]?\d|2[0-3])(?::([0-5]\d))?(?::([0-5]\d))?", re.ASCII),
        (86400, 3600, 60, 1),
    ),
    (
        re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?"),
        (86400, 3600, 60, 1),
    ),
)
_UNIT_WORDS = (
    ("d(?:ays?)?", "d"),
    ("h(?:(?:ou)?rs?)?", "h"),
    ("min(?:ute)?s?", "m"),
    ("sec(?:ond)?s?", "s"),
)
_SIZE = re.compile(r"(\d+)\s*(TiB|Ti|T|GiB|Gi|G|MiB|Mi|M|KiB|Ki|K|B|)")
# T, G, M and K are binary in the workflow format, so also here.
_BYTES = {"T": 1 << 40, "G": 1 << 30, "M": 1 << 20, "K": 1 << 10, "B": 1, "": 1}


def parse_seconds(text: str) -> float | None:
    """Return a duration in seconds; None if invalid."""
    match = _PATTERN.fullmatch(text.strip())
    return float(match.group(1)) * _SECONDS[match.group(2)] if match else None


def parse_timeout(text: str) -> float | None:
    """Return seconds from any duration of the workflow format or of a scheduler, or `1h30m`.

    A bare number is in seconds; `10:00` is ten minutes.
    """
    word = text.strip()
    simple = parse_seconds(word)
    if simple is not None:
        return simple
    if _COMPOUND.fullmatch(word):
        parts = re.findall(r"(\d+)(ms|us|s|m|h|d)", word)
        return sum(int(number) * _SECONDS[unit] for number, unit in parts)
    for form, factors in _FORMS:
        match = form.fullmatch(word)
        if match is not None and any(match.groups()):
            numbers = [float(group or 0) for group in match.groups()]
            return sum(map(float.__mul__, numbers, map(float, factors)))
    return None


def near_duration(text: str) -> str | None:
    """Return the valid form probably meant by `2 hours`, `1h30` or `1:5:0`, or None."""
    word = "".join(text.lower().split())
    for spelled, unit in _UNIT_WORDS:
        word = re.sub(rf"(?<=\d){spelled}(?![a-z])", unit, word)
    word = re.sub(r"(?<=h)\d+\Z", lambda rest: f"{rest[0]}m", word)
    word = re.sub(r"(?<=:)\d(?!\d)", lambda digit: f"0{digit[0]}", word)
    return word if word != text.strip() and parse_timeout(word) else None


def duration_fix(option: str, text: str, examples: str) -> str:
    """Return the hint for an invalid duration."""
    near = near_duration(text)
    return f"did you mean `{option} {near}`?" if near else f"{option} {examples}"


def parse_size(text: str) -> int | None:
    """Return a size in bytes from `64Gi`, `500M`, `1024`; None if invalid."""
    match = _SIZE.fullmatch(text.strip())
    return int(match.group(1)) * _BYTES[match.group(2)[:1]] if match else None
