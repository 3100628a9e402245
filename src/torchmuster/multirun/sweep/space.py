"""Parse `--grid` and `--zip`: names, lists and ranges of values, and the members they make."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.core.model.contract import MEMBER_VARIABLE
from torchmuster.core.spec.problems import Problems
from torchmuster.multirun.sweep.plan import MAX_MEMBERS, variable_of

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_RANGE = re.compile(r"(-?\d{1,18}):(-?\d{1,18})(?::(-?\d{1,18}))?")
_FRACTIONS = re.compile(r"-?[\d.]+(?:e-?\d+)?(?:(?::|\.\.)-?[\d.]+(?:e-?\d+)?){1,2}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SHAPE = "NAME=VALUE,VALUE,... or NAME=FIRST:END"
_SHOWN = 60
_NAMES = "a letter or `_`, then up to 63 letters, digits, `_`, `.` and `-`"
_HAS_CONTROL = "a value of `{}` has a newline or a control character"
_NO_CONTROL = "it goes into a command line, a variable and a table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The values of one name; ranges are expanded only after the number of members is checked."""

    name: str
    items: tuple[str | range, ...]

    def __len__(self) -> int:
        """Return the number of values."""
        return sum(1 if isinstance(item, str) else len(item) for item in self.items)

    def values(self) -> list[str]:
        """Return the values as text."""
        found: list[str] = []
        for item in self.items:
            found += [item] if isinstance(item, str) else [str(number) for number in item]
        return found


def plan_members(
    grid: Sequence[str], zipped: Sequence[str], problems: Problems
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names, and the values of each member: every grid combination with every zip row.

    The last name varies fastest. If there are problems, add them to `problems` and return no
    members.
    """
    axes = [axis for word in grid if (axis := _axis(word, "--grid", problems)) is not None]
    rows = [axis for word in zipped if (axis := _axis(word, "--zip", problems)) is not None]
    if not grid and not zipped:
        fix = "muster sweep train.py --grid lr=1e-3,1e-4 seed=0:3"
        problems.add("a sweep needs values to try", "--grid", fix=fix)
    names = tuple(axis.name for axis in (*axes, *rows))
    _check_names(names, problems)
    lengths = {axis.name: len(axis) for axis in rows}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        problems.add("the values of `--zip` are of different number", "--zip", counts)
    total = math.prod(len(axis) for axis in axes) * (len(rows[0]) if rows else 1)
    if total > MAX_MEMBERS:
        counts = ", ".join(f"{axis.name} {len(axis):,}" for axis in (*axes, *rows))
        fix = "fewer values, or several sweeps"
        what = f"a sweep has at most {MAX_MEMBERS:,} members, these values make {total:,}"
        problems.add(what, "--grid", f"values: {counts}", fix)
    if problems.found:
        return names, ()
    for axis in (*axes, *rows):
        _check_twice(axis, problems)
    if problems.found:
        return names, ()
    pairs = list(zip(*(axis.values() for axis in rows), strict=True)) if rows else [()]
    combined = itertools.product(*(axis.values() for axis in axes), pairs)
    return names, tuple((*values[:-1], *values[-1]) for values in combined)


def check_members(
    names: Sequence[str], members: Sequence[Sequence[str]], problems: Problems
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Check the names and the members' values from a Python client, and return them."""
    for name in names:
        if not _NAME.fullmatch(name):
            problems.add(f"`{_shown(name)}` can't be the name of a value", name, _NAMES)
    _check_names(names, problems)
    for name, values in zip(names, zip(*members, strict=True), strict=True):
        if any(_CONTROL.search(value) for value in values):
            problems.add(_HAS_CONTROL.format(name), name, _NO_CONTROL)
    if len(members) > MAX_MEMBERS:
        what = f"a sweep has at most {MAX_MEMBERS:,} members, these values make {len(members):,}"
        problems.add(what, "--grid", fix="fewer values, or several sweeps")
    return tuple(names), tuple(tuple(values) for values in members)


def _axis(word: str, option: str, problems: Problems) -> Axis | None:
    name, equals, text = word.partition("=")
    where = f"{option} {_shown(word)}"
    if not equals:
        problems.add(f"`{_shown(word)}` has no values", where, fix=_SHAPE)
        return None
    if not _NAME.fullmatch(name):
        problems.add(f"`{_shown(name)}` can't be the name of a value", where, _NAMES)
        return None
    if _CONTROL.search(text):
        problems.add(_HAS_CONTROL.format(name), where, _NO_CONTROL)
        return None
    if re.fullmatch(r"\[.*,.*\]|\(.*,.*\)", text):
        values = text[1:-1].replace(" ", "")
        fix = f"""{name}={values}; one value with commas is '{name}="{text}"'"""
        problems.add(f"the values of `{name}` stand in brackets", where, fix=fix)
        return None
    words = _split(text)
    if words is None:
        why = "a value that begins with a quotation mark ends with one; two of them stand for one"
        problems.add(f"a quotation mark of `{name}` is not closed", where, why)
        return None
    items: list[str | range] = []
    for value, is_quoted in words:
        if not value and not is_quoted:
            fix = f'{_SHAPE}; an empty text is `{name}=""`, quoted for the shell'
            problems.add(f"`{name}` has an empty value", where, fix=fix)
            return None
        found = _range(name, value, where, problems) if not is_quoted else value
        if found is None:
            return None
        items.append(found)
    return Axis(name=name, items=tuple(items))


def _split(text: str) -> list[tuple[str, bool]] | None:
    """Return the values between commas, and whether each was quoted; None if a quote is open."""
    found: list[tuple[str, bool]] = []
    rest = text
    while True:
        if rest.startswith('"'):
            match = re.match(r'"((?:[^"]|"")*)"(?=,|$)', rest)
            if match is None:
                return None
            found.append((match[1].replace('""', '"'), True))
            rest = rest[match.end() :]
        else:
            value = rest.partition(",")[0]
            found.append((value, False))
            rest = rest[len(value) :]
        if not rest:
            return found
        rest = rest[1:]


def _range(name: str, value: str, where: str, problems: Problems) -> str | range | None:
    match = _RANGE.fullmatch(value)
    if match is None and len(value) <= _SHOWN and _FRACTIONS.fullmatch(value):
        why = "a range counts whole numbers: FIRST:END, or FIRST:END:STEP"
        fix = f"""{name}=0.1,0.2,0.5; the text itself is '{name}="{value}"'"""
        problems.add(f"`{value}` of `{name}` is no range", where, why, fix)
        return None
    if match is None:
        return value
    first, end, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if step == 0:
        problems.add(f"the range `{value}` of `{name}` has a step of 0", where)
        return None
    numbers = range(first, end, step)
    if not numbers:
        why = f"it counts from {first} and ends before {end}, as Python's range does"
        fix = f'the text itself is `{name}="{value}"`, quoted for the shell'
        problems.add(f"the range `{value}` of `{name}` is empty", where, why, fix)
        return None
    return numbers


def _check_names(names: Sequence[str], problems: Problems) -> None:
    seen: dict[str, str] = {}
    for name in names:
        variable = variable_of(name)
        if names.count(name) > 1:
            if name not in seen.values():
                fix = f"all values in one list: {name}=A,B"
                problems.add(f"`{name}` is given {names.count(name)} times", "--grid", fix=fix)
        elif variable in seen or variable == MEMBER_VARIABLE:
            other = f"`{seen[variable]}`" if variable in seen else "the number of the member"
            why = f"both would be {variable} in the script's environment"
            problems.add(f"`{name}` and {other} can't be told apart", "--grid", why)
        seen[variable] = name


def _check_twice(axis: Axis, problems: Problems) -> None:
    values = axis.values()
    twice = next(((value, num) for value, num in Counter(values).items() if num > 1), None)
    if twice is not None:
        fix = "runs that differ in nothing else: seed=0:3"
        what = f"`{axis.name}` has the value `{_shown(twice[0])}` {twice[1]} times"
        problems.add(what, "--grid", fix=fix)


def _shown(text: str) -> str:
    """Return a text for a message: printable, and not too long."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain if len(plain) <= _SHOWN else f"{plain[: _SHOWN - 3]}..."
