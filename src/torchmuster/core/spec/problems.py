"""Collect all problems in user input: in options, and in files by key path."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProblem:
    """An error or a warning about a file.

    Attributes:
        path: Keys and indices from the top of the file; `workflow` is the first.
        at_key: It concerns the key itself, not its value.
    """

    path: KeyPath
    what: str
    why: str | None = None
    fix: str | None = None
    at_key: bool = False

    def as_error(self, where: str | None) -> UsageError:
        """Return the error with its location."""
        return UsageError(self.what, where=where, why=self.why, fix=self.fix)


@dataclass(slots=True)
class FileProblems:
    """Collects errors and warnings about a file."""

    with_effect: frozenset[str] = frozenset()
    errors: list[FileProblem] = field(default_factory=list)
    warnings: list[FileProblem] = field(default_factory=list)

    def add(
        self,
        path: KeyPath,
        what: str,
        fix: str | None = None,
        *,
        why: str | None = None,
        at_key: bool = False,
    ) -> None:
        """Add an error."""
        self.errors.append(FileProblem(path=path, what=what, why=why, fix=fix, at_key=at_key))

    def warn(
        self,
        path: KeyPath,
        what: str,
        fix: str | None = None,
        *,
        why: str | None = None,
        at_key: bool = True,
    ) -> None:
        """Add a warning."""
        self.warnings.append(FileProblem(path=path, what=what, why=why, fix=fix, at_key=at_key))


def show_path(path: KeyPath) -> str:
    """Return `workflow.groups[0].tasks[1].image`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


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
