"""Find the files of a project that were saved since the last check.

Polls instead of using inotify, which misses files that another host saves on a network file
system. One check of 500 files takes 1 ms (docs/design.md).
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torchmuster.core.files.layout import muster_home
from torchmuster.launcher.files.code_copy import ask_git, walk_code

_CODE = ".py"
_SETTINGS = (".yaml", ".yml", ".toml", ".ini", ".cfg")  # a run may write .json and .txt
_OF_RUNS = frozenset({"runs", "outputs", "wandb", "mlruns", "lightning_logs", "__pycache__"})
_MOST_FILES = 4000
_LIST_AGAIN_S = 0.5
_LOOK_S = 0.04
_MOST_LOOK_S = 0.2
_COST = 20  # polling takes at most a twentieth of a processor
_QUIET_S = 0.02  # for an editor that saves several files, or one file in several steps
_SETTLES_S = 1.0
_GONE: tuple[int, ...] = ()

Facts = Mapping[str, tuple[int, ...]]


class SavedFiles:
    """The watched files below some folders, and which of them were saved.

    Args:
        folders: The folders of the script, of the project and of its modules. If one is in a git
            work tree, the whole tree is watched.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = tuple(folders)
        self._listed_at = 0.0
        self._paths: list[str] = []
        self._directories: Facts = {}
        self._facts: Facts = {}
        self._list()
        self._facts = facts_of(self._paths)

    @property
    def num_files(self) -> int:
        """Return the number of watched files."""
        return len(self._paths)

    def look(self) -> tuple[str, ...]:
        """Return the files saved since the last call; wait until the editor has finished saving."""
        found = self._poll_once()
        if not found:
            return ()
        saved = dict.fromkeys(found)
        until = time.monotonic() + _SETTLES_S
        quiet_at = time.monotonic() + _QUIET_S
        while time.monotonic() < min(quiet_at, until):
            pause(_QUIET_S / 2)
            if more := self._changed():
                saved |= dict.fromkeys(more)
            if more or any(
                _is_empty(self._facts.get(path, _GONE)) for path in saved
            ):  # being written
                quiet_at = time.monotonic() + _QUIET_S
        return tuple(saved)

    def pause_s(self) -> float:
        """Return how long to wait before the next check."""
        return min(max(_LOOK_S, self._took_s * _COST), _MOST_LOOK_S)

    def _poll_once(self) -> list[str]:
        """Return the known files that were saved; only if there are none, look for new ones.

        Listing asks git, and no run should wait for that.
        """
        began = time.process_time()  # without the time in which other processes ran
        found = self._changed()
        self._took_s = time.process_time() - began
        is_due = time.monotonic() - self._listed_at >= _LIST_AGAIN_S
        if not found and is_due and facts_of(self._directories) != self._directories:
            self._list()
            found = self._changed()
        return found

    def _changed(self) -> list[str]:
        before, self._facts = self._facts, facts_of(self._paths)
        return changed(before, self._facts)

    _took_s = 0.0

    def _list(self) -> None:
        self._listed_at = time.monotonic()
        self._paths = list_files(self._folders)
        directories = dict.fromkeys([*self._folders, *map(os.path.dirname, self._paths)])
        self._directories = facts_of(directories)


def _is_empty(facts: tuple[int, ...]) -> bool:
    return facts != _GONE and facts[1] == 0


def pause(seconds: float) -> None:
    """Wait; a signal that has a handler ends the wait early."""
    import select

    select.select([], [], [], seconds)


def changed(before: Facts, after: Facts) -> list[str]:
    """Return the files that differ or are new; a removed file does not count as saved."""
    return [path for path, facts in after.items() if facts != _GONE and before.get(path) != facts]


def facts_of(paths: Iterable[str]) -> Facts:
    """Return what shows that a file was saved: its inode number, size and modification time."""
    found: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            status = os.stat(path)
            found[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            found[path] = _GONE
    return found


def list_files(folders: Sequence[str]) -> list[str]:
    """Return the files to watch: those of the work trees; in very large ones, of `folders` only."""
    roots = dict.fromkeys(work_tree(folder) or folder for folder in folders)
    found = [path for root in roots for path in _files_below(root)]
    if len(found) > _MOST_FILES:
        near = tuple(f"{folder}{os.sep}" for folder in folders)
        found = [path for path in found if path.startswith(near)][:_MOST_FILES]
    return list(dict.fromkeys(found))


def work_tree(folder: str) -> str | None:
    """Return the root of the git work tree that contains a folder, or None."""
    here = folder
    while not os.path.exists(os.path.join(here, ".git")):
        if here == os.path.dirname(here):
            return None
        here = os.path.dirname(here)
    return here


def _files_below(root: str) -> Iterator[str]:
    home = os.path.join(os.path.realpath(muster_home()), "")
    tracked = ask_git(root, "ls-files", "-t", "-co", "--exclude-standard", "-z")
    if tracked is None:
        names = [name for name in walk_code(root) if not _OF_RUNS & set(name.split(os.sep))]
        wanted = [name for name in names if name.endswith((_CODE, *_SETTINGS))]
    else:
        entries = (os.fsdecode(entry) for entry in tracked.split(b"\0"))
        wanted = [entry[2:] for entry in entries if is_watched(entry[2:], is_new=entry[:1] == "?")]
    for name in wanted:
        path = os.path.join(root, name)
        if not os.path.realpath(path).startswith(home):
            yield path


def is_watched(name: str, *, is_new: bool) -> bool:
    """Return whether to watch a file of a work tree; a run may have written an untracked one."""
    if is_new:
        return name.endswith(_CODE) and not _OF_RUNS & set(name.split("/"))
    return name.endswith((_CODE, *_SETTINGS))
