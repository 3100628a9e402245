"""What lies around a script and must happen in an interpreter of its own: one that is started for each rank.

A file beside the script that has the name of one of Python's own modules hides it, for torch as for the script; in
the spawner either ours or the script's would be the wrong one. And code that Python runs at its start (sitecustomize,
`.pth` files) has run in the spawner, before there was a rank to read.
"""

import contextlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Collection, Iterator

RANK = re.compile(
    r"\b(?:(?:LOCAL_|GROUP_|ROLE_)?RANK|(?:LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)"
    r"|TORCHELASTIC_\w+|TORCHMUSTER_\w+|SLURM_(?:PROCID|LOCALID)|(?:PMI|PMIX|OMPI_COMM_WORLD)_RANK)\b"
)
_IMPORT = re.compile(r"^import[ \t]+([A-Za-z_]\w*)")
_REFUSES = re.compile(
    r"""^[ \t]*if[ \t(]+["']torch["'][ \t]+in[ \t]+sys\.modules\b[^\n]*:\s*(?:#[^\n]*\n\s*)*raise\b""",
    re.MULTILINE,
)
_FEW_FILES = 24
_MAX_BYTES = 1 << 20


def hidden_modules(folder: str | None, at_start: Collection[str]) -> list[str]:
    """Return Python's own modules that files in the script's folder hide.

    Args:
        folder: What stands in front of `sys.path`.
        at_start: The modules that every interpreter has from its start on: these can't be hidden.
    """
    try:
        entries = os.listdir(folder) if folder is not None else []
    except OSError:
        return []
    own = sys.stdlib_module_names.difference(at_start, sys.builtin_module_names)
    return sorted({name for entry in entries if (name := _module_name(folder, entry)) in own})


def _module_name(folder: str | None, entry: str) -> str:
    for suffix in importlib.machinery.all_suffixes():
        if entry.endswith(suffix):
            return entry.removesuffix(suffix)
    return entry if os.path.isfile(os.path.join(folder or "", entry, "__init__.py")) else ""


def refuses_torch(imported: Collection[str], folder: str | None) -> str | None:
    """Return which of the packages that a script imports raises an error where torch was imported before it.

    Its own files say so, as those of Isaac Gym do; only what lies in the package's folder itself is read, of small ones.
    """
    paths = [*([folder] if folder is not None else []), *sys.path]
    for name in sorted({name.partition(".")[0] for name in imported} - sys.stdlib_module_names):
        spec = importlib.machinery.PathFinder.find_spec(name, paths) if name != "torch" else None
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            with contextlib.suppress(OSError):
                files = [entry for entry in os.listdir(place) if entry.endswith(".py")]
                files = files if len(files) <= _FEW_FILES else ["__init__.py"]
                if any(_REFUSES.search(_read(os.path.join(place, file))) for file in files):
                    return name
    return None


def start_code_with_rank() -> str | None:
    """Return the file that Python ran at its start and that reads what only a worker has."""
    return next((path for path, text in _start_code() if RANK.search(text)), None)


def _start_code() -> Iterator[tuple[str, str]]:
    for name in ("sitecustomize", "usercustomize"):
        yield from _module_text(name)
    if sys.flags.no_site:
        return
    import site

    folders = site.getsitepackages()
    folders += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    for folder in folders:
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".pth"))
        except OSError:
            continue
        for name in names:
            yield from _pth_texts(os.path.join(folder, name))


def _pth_texts(path: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a .pth file that are code, and the modules that they import."""
    lines = [line for line in _read(path).splitlines() if line.startswith(("import ", "import\t"))]
    yield path, "\n".join(lines)
    for line in lines:
        found = _IMPORT.match(line)
        if found is not None and found[1] not in sys.stdlib_module_names:
            yield from _module_text(found[1])


def _module_text(name: str) -> Iterator[tuple[str, str]]:
    path = getattr(sys.modules.get(name), "__file__", None)
    if isinstance(path, str) and path.endswith(".py"):
        yield path, _read(path)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
