"""Plug points: tables to which rooms and other packages add entries (docs/plugging-in.md).

A room has a module `plug` with `PLUGS`: for each plug point, a table from names to targets, written
as "module:name" below `torchmuster`. Other packages use an entry point of the group
`torchmuster.POINT`, under a name that no room uses. Targets are imported on first use; a room that
is not installed adds nothing.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# In the order of lookup: what a plain run needs is found in the first.
ROOMS = ("core", "launcher", "workflow", "multirun", "kubernetes", "diagnose", "report")


@functools.cache
def _plugs(room: str) -> dict[str, dict[str, Any]]:
    name = f"torchmuster.{room}.plug"
    try:
        found: dict[str, dict[str, Any]] = importlib.import_module(name).PLUGS
    except ModuleNotFoundError as error:
        if error.name not in (name, name.removesuffix(".plug")):
            raise
        return {}
    return found


def table(point: str) -> dict[str, Any]:
    """Return what the rooms add to a plug point, by name, without importing it."""
    return {name: what for room in ROOMS for name, what in _plugs(room).get(point, {}).items()}


def load(what: str) -> Any:
    """Import and return "module:name", or a whole module, below `torchmuster`."""
    module, _, name = what.partition(":")
    found = importlib.import_module(f"torchmuster.{module}")
    return getattr(found, name) if name else found


def find(point: str, name: str) -> Any:
    """Load and return what the rooms register as `name` at a plug point; None if none does."""
    for room in ROOMS:
        if (what := _plugs(room).get(point, {}).get(name)) is not None:
            return load(what)
    return None


def entry(name: str) -> str:
    """Return the path of a program that the job's interpreter runs directly; empty if unknown."""
    path = table("entries").get(name)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(package, *path.split("/")) if path is not None else ""


def every(point: str) -> Iterator[Any]:
    """Load and yield everything that the rooms add to a plug point, in the order of the rooms."""
    yield from map(load, table(point).values())


@functools.cache
def _is_mentioned() -> bool:
    """Say whether an installed package adds entries, ten times faster than `importlib.metadata`."""
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if name.endswith((".dist-info", ".egg-info")):
                    with (
                        contextlib.suppress(OSError),
                        open(os.path.join(folder, name, "entry_points.txt"), "rb") as file,
                    ):
                        if b"[torchmuster." in file.read():
                            return True
    return False


@functools.cache
def others(point: str) -> "dict[str, EntryPoint]":
    """Return what other packages add to a plug point, by name.

    Raises:
        UsageError: Two packages use the same name, or a room already has it.
    """
    if not _is_mentioned():
        return {}
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    ours = table(point)
    for one in entry_points(group=f"torchmuster.{point}"):
        if one.name in ours or one.name in found:
            source = one.dist.name if one.dist is not None else one.value
            other = found.get(one.name)
            owner = other.dist.name if other is not None and other.dist is not None else "muster"
            raise UsageError(
                f"two packages bring the same of {point}: `{one.name}`, of {owner} and {source}",
                where=f"entry point torchmuster.{point}: {one.name} = {one.value}",
                fix=f"pip uninstall {source}",
            )
        found[one.name] = one
    return found


def load_other(point: str, name: str) -> Any:
    """Load and return what another package adds under a name; None if there is none.

    Raises:
        UsageError: It can't be imported.
    """
    one = others(point).get(name)
    if one is None:
        return None
    try:
        return one.load()
    except (ImportError, AttributeError) as error:
        source = one.dist.name if one.dist is not None else one.value
        raise UsageError(
            f"`{name}` of {source} can't be loaded",
            where=f"entry point torchmuster.{point}: {one.name} = {one.value}",
            why=str(error),
            fix=f"install {source} again, or without it: pip uninstall {source}",
        ) from error


def carried(point: str) -> tuple[str, ...]:
    """Return other packages' entries at a plug point, for the plan: nodes search no packages.

    Each is "name=folder|module:name"; the folder is the one from which the module is imported.
    """
    found = []
    for name, one in others(point).items():
        package = importlib.util.find_spec(one.module.partition(".")[0])
        where = package.origin if package is not None else None
        folder = os.path.dirname(where) if where is not None else ""
        if package is not None and package.submodule_search_locations is not None:
            folder = os.path.dirname(folder)
        found.append(f"{name}={folder}|{one.value}")
    return tuple(sorted(found))


def load_carried(those: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Load a plan's carried entries; return them by name, and a sentence for each missing one."""
    found: dict[str, Any] = {}
    lacking = []
    for one in those:
        name, _, rest = one.partition("=")
        folder, _, value = rest.partition("|")
        module, _, attribute = value.partition(":")
        if folder and folder not in sys.path:
            sys.path.append(folder)  # last, so that it can't shadow a module of ours
        try:
            found[name] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            lacking.append(f"`{name}` ({value}, from {folder}) is left out: {error}")
    return found, lacking
