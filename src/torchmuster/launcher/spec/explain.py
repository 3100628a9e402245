"""Translate pydantic's errors into ours; its own never reach a user."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from torchmuster.core.model.text import did_you_mean
from torchmuster.core.spec.problems import FileProblems, KeyPath, show_path
from torchmuster.launcher.spec.scalars import kind_of, shown

_Keys = TypeVar("_Keys", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """How to write hints for one kind of file.

    Attributes:
        missing: Format of an entry for a missing key: `{}: ...`.
        unknown: Returns the hint for an unknown key at a path.
        map: Returns the hint for a value that should be a map.
    """

    missing: str
    unknown: Callable[[KeyPath], str | None]
    map: Callable[[KeyPath, Any], str | None] = lambda _path, _found: None

    def read(
        self,
        model: type[_Keys],
        raw: Any,
        top: KeyPath,
        findings: FileProblems,
        context: Any = None,
    ) -> _Keys | None:
        """Return the checked values; None if there are errors, which go to `findings`."""
        try:
            return model.model_validate(raw, context=context)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                self._take(problem, (*top, *_real_path(tuple(problem["loc"]), raw)), findings)
            return None

    def unknown_key(self, path: KeyPath, findings: FileProblems) -> None:
        """Report an unknown key, with the probable one."""
        what = f"unknown key {shown(str(path[-1]))} in {show_path(path[:-1]) or 'this file'}"
        findings.add(path, what, self.unknown(path), at_key=True)

    def _take(self, problem: Any, path: KeyPath, findings: FileProblems) -> None:
        kind, found = problem["type"], problem["input"]
        at_key = problem["loc"][-1:] == ("[key]",)
        if kind == "muster":
            what = problem["ctx"]["what"]
            if at_key and what.startswith("expected a text"):
                what = f"expected a text as the key, found {kind_of(found)}"
            findings.add(path, what, problem["ctx"].get("fix"), at_key=at_key)
        elif kind == "extra_forbidden":
            self.unknown_key(path, findings)
        elif kind == "missing":
            what = f"`{path[-1]}` is missing in {show_path(path[:-1])}"
            findings.add(path[:-1], what, self.missing.format(path[-1]), at_key=True)
        elif kind in ("model_type", "dict_type"):
            findings.add(path, f"expected a map, found {kind_of(found)}", self.map(path, found))
        elif kind == "list_type":
            fix = "begin each entry with `- `" if isinstance(found, dict) else None
            fix = f"[{found}]" if isinstance(found, str) and len(found) < 60 else fix
            findings.add(path, f"expected a list, found {kind_of(found)}", fix)
        elif kind == "literal_error":
            allowed = problem["ctx"]["expected"].replace("'", "`")
            names = re.findall(r"`(\w+)`", allowed)
            fix = did_you_mean(found, names) if isinstance(found, str) else None
            findings.add(path, f"{kind_of(found)} is not one of {allowed}", fix)
        elif kind == "invalid_key":
            what = f"expected a text as the key, found {kind_of(path[-1])}"
            findings.add(path, what, at_key=True)
        else:
            findings.add(path, f"this value does not fit, found {kind_of(found)}")


def hint_for_key(
    key: str, known: Any, other_words: Mapping[str, str], otherwise: str | None
) -> str | None:
    """Return a hint with the key that was probably meant: a synonym or a near miss."""
    other = other_words.get(key.lower())
    return f"did you mean `{other}`?" if other in known else did_you_mean(key, known, otherwise)


def _real_path(location: tuple[Any, ...], raw: Any) -> tuple[Any, ...]:
    """Remove pydantic's additions to a path: the members of a union, `[key]`."""
    path: list[Any] = []
    here = raw
    for part in location:
        if (isinstance(here, Mapping) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        ):
            here = here[part]
        elif isinstance(here, Mapping) and (key := _key_of(here, part)) is not None:
            part = key  # noqa: PLW2901 - pydantic names a key by its text
            here = here[key]
        elif part in ("[key]", "(text)", "(map)") or not isinstance(here, Mapping):
            continue
        else:
            here = None
        path.append(part)
    return tuple(path)


def _key_of(found: Mapping[Any, Any], part: Any) -> Any:
    return next((key for key in found if not isinstance(key, str) and str(key) == part), None)
