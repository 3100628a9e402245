"""Make the call file of a function: by its name where workers can import it, by value where it stands in a notebook."""

import functools
import importlib.metadata
import linecache
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.launcher.model.carried import (
    MAX_CALL_BYTES,
    CallHead,
    Named,
    own_python,
    pack_call,
    pack_value,
)

_MAX_SOURCE_CHARS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCall:
    """A function on its way.

    Attributes:
        target: `module:function`, for the plan and for `ps`.
        data: The content of the call file.
        module_file: Of the module that has the function; None of one that travels by value.
    """

    target: str
    data: bytes
    module_file: str | None


def name_of(function: Callable[..., Any]) -> str:
    """Return what messages call a function."""
    inner = _inner(function)
    whole: str = getattr(inner, "__qualname__", type(inner).__qualname__)
    return whole.rpartition("<locals>.")[2]


def run_name(target: str) -> str:
    """Return the start of a run's id: the name of the function."""
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in target.partition(":")[2])
    return name.strip("-")[:24].strip("-") or "function"


def pack(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cwd: str,
    members: Sequence[Mapping[str, Any]] = (),
) -> PackedCall:
    """Return the call of a function.

    Args:
        function: Of an importable module, of `__main__` or of a notebook.
        args: Its positional arguments.
        kwargs: The others.
        cwd: The working directory, to which paths are relative.
        members: Of a sweep, what each member is called with beside the others.

    Raises:
        CarryError: It can't travel; the sentence names the variable.
    """
    name = name_of(function)
    given = {f"args[{number}]": value for number, value in enumerate(args)}
    varied = {key: [member[key] for member in members] for key in (members[0] if members else ())}
    parts = {"": function, **given, **kwargs, **varied}
    call = (function, tuple(args), dict(kwargs))
    whole = Named((*call, [dict(member) for member in members]) if members else call, parts)
    pickled = pack_value(whole, f"the call of `{name}`", "", MAX_CALL_BYTES)
    by_value = b"cloudpickle" in pickled
    inner = _inner(function)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    has_module = module is not None and _is_of(module, inner)
    head = CallHead(
        name=name,
        python=own_python(),
        cloudpickle=importlib.metadata.version("cloudpickle") if by_value else "",
        paths=tuple(_paths(cwd)),
        sources=dict(_sources(inner)),
    )
    return PackedCall(
        target=f"{inner.__module__ if has_module else '__main__'}:{name}",
        data=pack_call(head, pickled),
        module_file=_own_file(module, cwd) if has_module else None,
    )


def _inner(function: Callable[..., Any]) -> Any:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return inner.__func__ if isinstance(inner, types.MethodType) else inner


def _is_of(module: types.ModuleType, inner: Any) -> bool:
    """Say whether workers find this very object by its name, as pickle does."""
    if module.__name__ == "__main__" or getattr(module, "__spec__", None) is None:
        return False
    found: Any = module
    for part in getattr(inner, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is inner


def _paths(cwd: str) -> Iterator[str]:
    """Yield where the client finds modules and another Python does not: `sys.path` without what comes with Python."""
    root = _root(cwd)
    for entry in sys.path:
        path = os.path.realpath(entry or cwd)
        if path == os.path.realpath(cwd) or not os.path.isdir(path) or _comes_with_python(path):
            continue
        yield os.path.relpath(path, os.path.realpath(cwd)) if _is_below(path, root) else path


def _own_file(module: types.ModuleType | None, cwd: str) -> str | None:
    """Return the file of a module in the folder of the code, which travels; None of an installed one."""
    path = os.path.realpath(getattr(module, "__file__", None) or os.devnull)
    return path if _is_below(path, _root(cwd)) and not _comes_with_python(path) else None


def _comes_with_python(path: str) -> bool:
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own |= {*site.getsitepackages(), site.getusersitepackages()}
    return any(_is_below(path, os.path.realpath(folder)) for folder in own)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}{os.sep}")


def _root(cwd: str) -> str:
    """Return the folder with `.git` around a folder, else itself: what travels to hosts that share nothing."""
    folder = start = os.path.realpath(cwd)
    while not os.path.exists(os.path.join(folder, ".git")):
        if folder == os.path.dirname(folder):
            return start
        folder = os.path.dirname(folder)
    return folder


def _sources(inner: Any) -> Iterator[tuple[str, str]]:
    """Yield the cell of a notebook that a function stands in, for the tracebacks of workers."""
    code = getattr(inner, "__code__", None)
    name = getattr(code, "co_filename", "")
    text = "".join(linecache.getlines(name)) if name else ""
    entry = linecache.cache.get(name)
    is_lazy = entry is not None and (len(entry) == 1 or entry[1] is None)  # of no file
    if text and len(text) <= _MAX_SOURCE_CHARS and (is_lazy or not os.path.exists(name)):
        yield name, text
