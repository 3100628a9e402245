"""Whether what a door has imported is still what an import would give: its files, variables, interpreter and folder."""

import contextlib
import importlib.machinery
import os
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torchmuster.core.node.spawner.mainmodule import imported_for_the_job

# A file that was changed while it was imported may have been read before or after: its time is not before the beginning.
_SLACK_NS = 50_000_000
_SHOWN = 3
# True of a shell or a node, and read by no import.
_VOLATILE = frozenset(
    {
        *("PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "TERM", "COLORTERM", "WINDOWID"),
        *("DISPLAY", "STY", "PS1", "PS2", "LS_COLORS", "HISTFILE", "CUDA_VISIBLE_DEVICES"),
        *("PYTEST_CURRENT_TEST", "INVOCATION_ID", "JOURNAL_STREAM"),
    }
)
_VOLATILE_BEGINS = ("SSH_", "TMUX", "TERM_", "MUSTER_", "TORCHMUSTER_", "VSCODE_", "XDG_SESSION")
# Libraries read these when they are loaded, without Python.
_NATIVE_BEGINS = (
    *("PYTHON", "LD_", "LC_", "LANG", "TZ", "GLIBC_", "MALLOC_", "OMP_", "KMP_", "GOMP_", "MKL"),
    *("OPENBLAS", "BLIS_", "TORCH", "PYTORCH", "ATEN_", "C10_", "GLOO_", "NCCL_", "CUDA", "CUBLAS"),
    *("CUDNN", "NVIDIA_", "NVTE_", "HIP_", "ROC", "HSA_", "MIOPEN", "UCX_", "FI_", "OMPI_", "XLA_"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What has been imported, and under which circumstances.

    Attributes:
        python: The interpreter and its flags.
        environment: The variables that were read while it was imported.
        read: The names of those, also of the ones that were not set.
        preload: The modules that were asked for.
        folder: What stood in front of `sys.path`.
        files: For each file that a module came from, what tells whether it has changed.
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
        """Return why a run with these needs other imports; None if these serve it."""
        if python != self.python:
            return f"the interpreter is {' '.join(python)}"
        missing = [name for name in preload if name not in self.preload]
        if missing:
            return f"--preload {missing[0]} is new"
        changed = changed_variables(self.environment, read_by_imports(environment, self.read))
        if changed:
            return f"variables have changed: {_few(changed)}"
        edited = changed_files(self.files)
        if edited:
            return f"files of imported modules have changed: {_few(edited)}"
        if folder != self.folder:
            if self.preload:
                return f"modules are imported from {folder}"
            moved = sorted({*own_modules(self.folder), *hides(folder)})
            if moved:
                return f"{folder} has a module `{moved[0]}` of its own"
        return None


def _few(words: list[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


class _Watched(os._Environ):  # type: ignore[type-arg]  # its parameter is of the stubs only
    """`os.environ` that notes which names are asked for; a copy of all, as for a subprocess, is no question."""

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
_copied: deque[str] = deque()  # the names of a copy that is being made, which come in this order


@contextlib.contextmanager
def noting_reads() -> Iterator[set[str]]:
    """Context that yields the names of the variables which Python code asks for in it."""
    kind = type(os.environ)
    _asked.clear()
    os.environ.__class__ = _Watched  # modules have the object itself
    try:
        yield _asked
    finally:
        os.environ.__class__ = kind


def read_by_imports(environment: Mapping[str, str], read: Collection[str]) -> dict[str, str]:
    """Return the variables that imports have read, or libraries may have read when they were loaded."""
    return {
        name: value
        for name, value in environment.items()
        if name in read or name.startswith(_NATIVE_BEGINS)
        if name not in _VOLATILE and not name.startswith(_VOLATILE_BEGINS)
    }


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of those that differ."""
    return sorted(n for n in {*before, *after} if before.get(n) != after.get(n))


def imported_files(begun_ns: int) -> dict[str, tuple[int, ...]]:
    """Return the files that modules came from; one that changed after the beginning of the imports counts as changed.

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
    """Return the files that are not what they were."""
    return [path for path, facts in files.items() if _facts_of(path) != facts]


def own_modules(folder: str) -> list[str]:
    """Return the imported top-level modules that came from a folder."""
    begin = os.path.join(folder, "")
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if "." not in name and (getattr(module, "__file__", None) or "").startswith(begin)
    )


def hides(folder: str, standard: Collection[str] = sys.stdlib_module_names) -> list[str]:
    """Return the imported top-level modules that files of a folder would hide; Python's own are the spawner's business."""
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
        if module is None or stem in standard or path.startswith(os.path.join(folder, "")):
            continue
        if stem != entry or os.path.isfile(os.path.join(folder, entry, "__init__.py")):
            found.add(stem)
    return sorted(found)


def resident_bytes() -> int:
    """Return the memory that this process has, shared pages included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
