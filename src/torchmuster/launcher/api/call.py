"""Build the call file of a function: by name where workers can import it, else by value."""

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
    """A function call, ready to be sent to the workers.

    Attributes:
        target: `module:function`, for the plan and for `ps`.
        data: The content of the call file.
        module_file: The file of the function's module; None where the function travels by value.
    """

    target: str
    data: bytes
    module_file: str | None


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    inner = _inner(function)
    whole: str = getattr(inner, "__qualname__", type(inner).__qualname__)
    return whole.rpartition("<locals>.")[2]


def run_name(target: str) -> str:
    """Return the function's name in a form that can begin a run id."""
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in target.partition(":")[2])
    return name.strip("-")[:24].strip("-") or "function"


def pack(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cwd: str,
    members: Sequence[Mapping[str, Any]] = (),
) -> PackedCall:
    """Pack the call of a function.

    Args:
        function: From an importable module, from `__main__` or from a notebook.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        cwd: The working directory; import paths below its project are sent relative to it.
        members: In a sweep, the further keyword arguments of each member.

    Raises:
        CarryError: The function or an argument can't be sent; the message names the variable.
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
    """Return whether pickle's lookup by name finds this very object in an importable module."""
    if module.__name__ == "__main__" or getattr(module, "__spec__", None) is None:
        return False
    found: Any = module
    for part in getattr(inner, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is inner


def _paths(cwd: str) -> Iterator[str]:
    """Yield the entries of `sys.path` that another Python lacks, without the working directory."""
    root = _root(cwd)
    for entry in sys.path:
        path = os.path.realpath(entry or cwd)
        if path == os.path.realpath(cwd) or not os.path.isdir(path) or _comes_with_python(path):
            continue
        yield os.path.relpath(path, os.path.realpath(cwd)) if _is_below(path, root) else path


def _own_file(module: types.ModuleType | None, cwd: str) -> str | None:
    """Return the module's file if it is in the user's code, which travels; None if installed."""
    path = os.path.realpath(getattr(module, "__file__", None) or os.devnull)
    return path if _is_below(path, _root(cwd)) and not _comes_with_python(path) else None


def _comes_with_python(path: str) -> bool:
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own |= {*site.getsitepackages(), site.getusersitepackages()}
    return any(_is_below(path, os.path.realpath(folder)) for folder in own)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}{os.sep}")


def _root(cwd: str) -> str:
    """Return the folder around `cwd` with `.git`, else `cwd`: what is copied to hosts."""
    folder = start = os.path.realpath(cwd)
    while not os.path.exists(os.path.join(folder, ".git")):
        if folder == os.path.dirname(folder):
            return start
        folder = os.path.dirname(folder)
    return folder


def _sources(inner: Any) -> Iterator[tuple[str, str]]:
    """Yield the notebook cell that defines a function, for the workers' tracebacks."""
    code = getattr(inner, "__code__", None)
    name = getattr(code, "co_filename", "")
    text = "".join(linecache.getlines(name)) if name else ""
    entry = linecache.cache.get(name)
    is_lazy = entry is not None and (len(entry) == 1 or entry[1] is None)  # not read from a file
    if text and len(text) <= _MAX_SOURCE_CHARS and (is_lazy or not os.path.exists(name)):
        yield name, text
