"""Check that a server's imports are still valid: their files, variables, interpreter and folder."""

import contextlib
import importlib.machinery
import os
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torchmuster.core.model.text import few_of
from torchmuster.core.node.spawner.mainmodule import imported_for_the_job

# A file changed during the imports may have been read before or after: it counts as changed.
_SLACK_NS = 50_000_000
_SHOWN = 3
# Variables of a shell or a node, which no import reads.
_VOLATILE = frozenset(
    {
        *("PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "TERM", "COLORTERM", "WINDOWID"),
        *("DISPLAY", "STY", "PS1", "PS2", "LS_COLORS", "HISTFILE", "CUDA_VISIBLE_DEVICES"),
        *("PYTEST_CURRENT_TEST", "INVOCATION_ID", "JOURNAL_STREAM"),
    }
)
_VOLATILE_BEGINS = ("SSH_", "TMUX", "TERM_", "MUSTER_", "TORCHMUSTER_", "VSCODE_", "XDG_SESSION")
# Native libraries read these when they are loaded.
_NATIVE_BEGINS = (
    *("PYTHON", "LD_", "LC_", "LANG", "TZ", "GLIBC_", "MALLOC_", "OMP_", "KMP_", "GOMP_", "MKL"),
    *("OPENBLAS", "BLIS_", "TORCH", "PYTORCH", "ATEN_", "C10_", "GLOO_", "NCCL_", "CUDA", "CUBLAS"),
    *("CUDNN", "NVIDIA_", "NVTE_", "HIP_", "ROC", "HSA_", "MIOPEN", "UCX_", "FI_", "OMPI_", "XLA_"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What a server has imported, and what the imports depended on.

    Attributes:
        python: The interpreter and its flags.
        environment: The variables that the imports read.
        read: The names of the variables that were read, also of those that were not set.
        preload: The modules that were asked for.
        folder: The first entry of `sys.path`.
        files: For each file of a module, its `stat` values, to detect a change.
    """

    python: tuple[str, ...]
    environment: Mapping[str, str]
    read: frozenset[str]
    preload: tuple[str, ...]
    folder: str
    files: Mapping[str, tuple[int, ...]]

    def why_stale(
        self,
        python: tuple[str, ...],
        environment: Mapping[str, str],
        preload: tuple[str, ...],
        folder: str,
    ) -> str | None:
        """Return why a run with these values needs other imports; None if it can use these."""
        if python != self.python:
            return f"the interpreter is {' '.join(python)}"
        missing = [name for name in preload if name not in self.preload]
        if missing:
            return f"--preload {missing[0]} is new"
        changed = changed_variables(self.environment, read_by_imports(environment, self.read))
        if changed:
            return f"variables have changed: {few_of(changed, _SHOWN)}"
        edited = changed_files(self.files)
        if edited:
            return f"files of imported modules have changed: {few_of(edited, _SHOWN)}"
        if folder != self.folder:
            if self.preload:
                return f"modules are imported from {folder}"
            moved = sorted({*own_modules(self.folder), *hides(folder)})
            if moved:
                return f"{folder} has a module `{moved[0]}` of its own"
        return None


class _RecordingEnviron(os._Environ):  # type: ignore[type-arg]  # its parameter is of the stubs only
    """`os.environ` that records the names that are read, except by a copy of all of it."""

    def __getitem__(self, key: str) -> str:
        if _copied and _copied[0] == key:
            _copied.popleft()
        else:
            _asked.add(key)
        return str(super().__getitem__(key))

    def __iter__(self) -> Iterator[str]:
        names = list(super().__iter__())
        _copied.clear()
        _copied.extend(names)
        return iter(names)


_asked: set[str] = set()
_copied: deque[str] = deque()  # the names that a copy in progress will read next, in this order


@contextlib.contextmanager
def recording_reads() -> Iterator[set[str]]:
    """Yield the set of variable names that Python code reads inside this context."""
    kind = type(os.environ)
    _asked.clear()
    os.environ.__class__ = _RecordingEnviron  # modules have the object itself
    try:
        yield _asked
    finally:
        os.environ.__class__ = kind


def read_by_imports(environment: Mapping[str, str], read: Collection[str]) -> dict[str, str]:
    """Return the variables that imports read, or that native libraries may have read."""
    return {
        name: value
        for name, value in environment.items()
        if name in read or name.startswith(_NATIVE_BEGINS)
        if name not in _VOLATILE and not name.startswith(_VOLATILE_BEGINS)
    }


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that differ."""
    return sorted(n for n in {*before, *after} if before.get(n) != after.get(n))


def imported_files(begun_ns: int) -> dict[str, tuple[int, ...]]:
    """Return the files that modules came from, with their `stat` values.

    A file that changed after the imports began counts as changed.

    Args:
        begun_ns: When the first import began, in ns since 1970.
    """
    found: dict[str, tuple[int, ...]] = {}
    for module in [*sys.modules.values(), *imported_for_the_job.values()]:
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path not in found:
            facts = _facts_of(path)
            found[path] = () if facts and facts[-1] > begun_ns - _SLACK_NS else facts
    return found


def _facts_of(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:  # in a zip file, or removed
        return (0,)
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def changed_files(files: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the files that have changed."""
    return [path for path, facts in files.items() if _facts_of(path) != facts]


def own_modules(folder: str) -> list[str]:
    """Return the imported top-level modules that came from a folder."""
    begin = os.path.join(folder, "")
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if "." not in name and (getattr(module, "__file__", None) or "").startswith(begin)
    )


def hides(folder: str) -> list[str]:
    """Return the imported top-level modules that files in a folder would shadow.

    The standard library is excluded: the spawner handles it.
    """
    try:
        entries = os.listdir(folder)
    except OSError:
        return []
    suffixes = tuple(importlib.machinery.all_suffixes())
    found = set()
    for entry in entries:
        stem = next((entry[: -len(s)] for s in suffixes if entry.endswith(s)), entry)
        module = sys.modules.get(stem)
        path = getattr(module, "__file__", None) or ""
        if (
            module is None
            or stem in sys.stdlib_module_names
            or path.startswith(os.path.join(folder, ""))
        ):
            continue
        if stem != entry or os.path.isfile(os.path.join(folder, entry, "__init__.py")):
            found.add(stem)
    return sorted(found)


def resident_bytes() -> int:
    """Return the resident memory of this process, shared pages included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
