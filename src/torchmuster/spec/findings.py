"""What is wrong with a workflow file, by key path; `spec.load` turns it into `file:line:column`."""

import difflib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

KeyPath = tuple[str | int, ...]
_MAX_WORD, _MAX_NAMES = 200, 200  # of a search for a near miss


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProblem:
    """One error or warning.

    Attributes:
        path: Keys and indices from the top of the file; `workflow` stands first.
        at_key: It speaks of the key itself, not of its value.
    """

    path: KeyPath
    what: str
    why: str | None = None
    fix: str | None = None
    at_key: bool = False


@dataclass(slots=True)
class FileProblems:
    """Collects errors and warnings."""

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
        """Note an error."""
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
        """Note a warning."""
        self.warnings.append(FileProblem(path=path, what=what, why=why, fix=fix, at_key=at_key))


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return a hint that suggests the nearest known word."""
    names = list(known)
    if len(word) > _MAX_WORD:
        return otherwise
    if len(names) > _MAX_NAMES:  # comparing each with each takes time
        alike = (name for name in names if abs(len(name) - len(word)) < 3 and name[:1] == word[:1])
        names = list(itertools.islice(alike, _MAX_NAMES))
    near = difflib.get_close_matches(word, names, n=1)
    if not near:
        folded = {name.lower().replace("_", "").replace("-", ""): name for name in names}
        hit = folded.get(word.lower().replace("_", "").replace("-", ""))
        near = [hit] if hit else []
    return f"did you mean `{near[0]}`?" if near else otherwise


def show_path(path: KeyPath) -> str:
    """Return `workflow.groups[0].tasks[1].image`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
