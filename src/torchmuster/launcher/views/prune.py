"""Remove what ended runs have left: whole runs, or all but their record and newest good snapshot.

Nothing outside the folder of runs is touched: links are removed, never followed, and a folder on
another file system prevents the removal of its run. A run is renamed first, so that a half-removed
one never looks complete.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmuster.core.files.layout import RunDir, muster_home, runs_dir
from torchmuster.core.model.states import RunState
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.files.environment import kept_archives
from torchmuster.launcher.node import shelf
from torchmuster.launcher.views.find import all_runs, owner_lives, view_run
from torchmuster.launcher.views.run_view import RunView

DOOMED = ".pruned-"
ENVIRONMENTS = "environments"
_STEP = re.compile(r"step-(\d{9,})")
_LEFT_OVER = re.compile(r"\.step-\d+\.(?:\d+\.tmp|deleted)|bad-step-.*|\.pruned-.*")
_MANIFEST = "manifest.json"
_HEADER = re.compile(rb"torchmuster-snapshot \d{1,4} crc32=[0-9a-f]{8} bytes=(\d{1,15})\n")
_MAX_MANIFEST_BYTES = 1 << 28
_MAX_ENTRIES = 5_000_000  # in one run, to bound the walk
# Folders that a task needs only while it runs.
_OF_A_PLACE = ("work", "input", "view")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Files of one run or of a cache that can be removed.

    Attributes:
        paths: Files and folders, absolute; a whole run is its own folder.
        size_bytes: Their size on the disk.
        age_s: Seconds since the run's last sign of life.
    """

    name: str
    paths: tuple[str, ...]
    size_bytes: int
    age_s: float
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What would be removed, and a sentence for each run that is old enough but stays."""

    removals: tuple[Removal, ...]
    kept: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes that it would free."""
        return sum(removal.size_bytes for removal in self.removals)


def plan_prune(
    older_s: float,
    now: float,
    *,
    keep_last_snapshot: bool = False,
    with_linked: bool = False,
    most_bytes: int | None = None,
) -> PrunePlan:
    """Return what can be removed.

    Args:
        older_s: Keep runs with a sign of life within this time, in seconds.
        now: Seconds since 1970.
        keep_last_snapshot: Keep the record and the newest good snapshot of each run.
        with_linked: Include runs whose snapshots or outputs another ended run uses.
        most_bytes: Size limit for environments and for archives; the oldest beyond it can go, too.
    """
    kept: list[str] = []
    old: list[tuple[RunView, float]] = []
    views = all_runs()
    for view in views:
        age_s = now - _last_sign(view.run_dir)
        if age_s < older_s or os.path.islink(view.run_dir.path):
            continue
        why = why_not(view)
        if why is None:
            old.append((view, age_s))
        else:
            kept.append(f"{view.run_id}: {why}")
    # A restarted run writes into the folder of the first one, which stays while the restarted one
    # lives.
    users = [view for view in views if not with_linked or why_not(view) is not None]
    old = _without_linked(old, users, kept, users_go=not keep_last_snapshot)
    removals = [_removal(view, age_s, kept, keep_last_snapshot) for view, age_s in old]
    found = [r for r in removals if r is not None and r.paths]
    cached = (*_cache(older_s, now), *_archives(older_s, now, most_bytes))
    going = (*found, *_leftovers(), *cached, *_environments(older_s, most_bytes))
    return PrunePlan(removals=going, kept=tuple(kept))


def why_not(view: RunView) -> str | None:
    """Return why a run must stay; None if it has certainly ended."""
    if not view.is_readable and not os.path.isfile(view.run_dir.result):
        return "it is not a readable run"
    if view.state is RunState.UNKNOWN:
        return "it is unknown whether its job has ended"
    if not view.state.is_final:
        return f"it is {view.state.value}"
    if view.result is None and owner_lives(view.run_dir):
        return "its owner may still run"
    return None


def remove(removal: Removal) -> None:
    """Remove what was planned, after another check of the run; links are removed, not followed.

    Raises:
        RunDirectoryError: The run lives again, or something can't be removed.
    """
    if removal.name == ENVIRONMENTS:
        for path in removal.paths:
            if not shelf.forget(path):
                raise RunDirectoryError("an environment stays: a run uses it now", where=path)
        return
    folder = os.path.join(os.path.realpath(runs_dir()), removal.name)
    if not removal.name.startswith(DOOMED) and os.path.isdir(folder):
        why = why_not(view_run(RunDir(folder)))
        if why is not None:
            raise RunDirectoryError(f"the run {removal.name} stays: {why}", where=folder)
    for path in removal.paths:
        parent = os.path.dirname(path)
        if os.path.realpath(parent) != parent:  # when planned, the path had no link
            raise RunDirectoryError(
                f"`{removal.name}` stays: it is reached through a link", where=path
            )
        try:
            _remove_tree(path)
        except OSError as error:
            raise RunDirectoryError(
                f"`{removal.name}` can't be removed whole", where=path, why=str(error)
            ) from error


def _remove_tree(path: str) -> None:
    """Remove a file, a link or a folder relative to an open folder: no path can be swapped."""
    parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        name = os.path.basename(path)
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=parent)
            return
        doomed = name if name.startswith(DOOMED) else f"{DOOMED}{name}"
        if doomed != name:
            os.rename(name, doomed, src_dir_fd=parent, dst_dir_fd=parent)
        shutil.rmtree(doomed, dir_fd=parent)
    finally:
        os.close(parent)


def _without_linked(
    old: list[tuple[RunView, float]], users: Sequence[RunView], kept: list[str], *, users_go: bool
) -> list[tuple[RunView, float]]:
    """Leave out runs that another run uses; with `users_go`, runs in `old` don't count as users."""
    used = {view.run_dir.path: used_folders(view) for view in users}
    while True:
        going = {view.run_dir.path for view, _ in old} if users_go else set()
        needed: dict[str, str] = {}
        for user, folders in used.items():
            if user not in going:
                needed |= {folder: os.path.basename(user) for folder in folders}
        stays = [entry for entry in old if os.path.realpath(entry[0].run_dir.path) in needed]
        if not stays:
            return old
        for view, _ in stays:
            user = needed[os.path.realpath(view.run_dir.path)]
            kept.append(f"{view.run_id}: {user} uses its snapshots or outputs (--linked)")
        old = [entry for entry in old if entry not in stays]


def used_folders(view: RunView) -> set[str]:
    """Return the folders of other runs to which a run has links."""
    links = [view.run_dir.snapshots, *view.links()]
    root = os.path.realpath(runs_dir()) + os.sep
    found = set()
    for link in links:
        target = os.path.realpath(link)
        if target.startswith(root):
            found.add(root + target[len(root) :].split(os.sep)[0])
    return found - {os.path.realpath(view.run_dir.path)}


def _removal(
    view: RunView, age_s: float, kept: list[str], keep_last_snapshot: bool
) -> Removal | None:
    path = os.path.join(os.path.realpath(runs_dir()), view.run_id)
    paths = tuple(_surplus(RunDir(path))) if keep_last_snapshot else (path,)
    size_bytes = 0
    for one in paths:
        size = measure(one)
        if size is None:
            kept.append(
                f"{view.run_id}: a part of it is on another file system, or it is too large"
            )
            return None
        size_bytes += size
    return Removal(
        name=view.run_id,
        paths=paths,
        size_bytes=size_bytes,
        age_s=age_s,
        is_whole=not keep_last_snapshot,
    )


def _surplus(run_dir: RunDir) -> Iterator[str]:
    """Yield what a run has apart from its record and its newest good snapshot."""
    yield from _old_snapshots(run_dir.snapshots)
    tasks = os.path.join(run_dir.path, "tasks")
    for task in _folders(tasks):
        for attempt in _folders(os.path.join(task, "training")):
            yield from _old_snapshots(RunDir(attempt).snapshots)
        for place in _folders(task):
            if os.path.basename(place).startswith("place-"):
                names = (os.path.join(place, name) for name in _OF_A_PLACE)
                yield from (path for path in names if os.path.lexists(path))


def _old_snapshots(folder: str) -> Iterator[str]:
    """Yield all snapshots but the newest good one; none in a link, which is another run's."""
    if os.path.islink(folder):
        return
    steps = sorted(
        (path for path in _folders(folder) if _STEP.fullmatch(os.path.basename(path))),
        key=lambda path: int(os.path.basename(path).removeprefix("step-")),
        reverse=True,
    )
    good = next((path for path in steps if is_good_snapshot(path)), None)
    if good is None:
        return  # none is known to be good: all stay
    yield from (path for path in steps if path != good)
    yield from (p for p in _folders(folder) if _LEFT_OVER.fullmatch(os.path.basename(p)))


def is_good_snapshot(path: str) -> bool:
    """Return whether a snapshot has a complete manifest and all files in full size."""
    try:
        with open(os.path.join(path, _MANIFEST), "rb") as file:
            header = _HEADER.fullmatch(file.readline(80))
            if header is None or int(header[1]) > _MAX_MANIFEST_BYTES:
                return False
            body = file.read(int(header[1]) + 1)
        if len(body) != int(header[1]):
            return False
        files = json.loads(body)["files"]
        return all(
            os.path.basename(name) == name and os.stat(os.path.join(path, name)).st_size == entry[0]
            for name, entry in files.items()  # name: [bytes, checksum]
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def measure(path: str) -> int | None:
    """Return the bytes on disk of a file or folder; None if too large or on two file systems."""
    top = os.lstat(path)
    size, waiting, num_entries = top.st_blocks * 512, [path], 0
    if not stat.S_ISDIR(top.st_mode):
        return size
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                num_entries += 1
                if facts.st_dev != top.st_dev or num_entries > _MAX_ENTRIES:
                    return None
                size += facts.st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return size


def _last_sign(run_dir: RunDir) -> float:
    """Return when a run last wrote something, in seconds since 1970."""
    paths = (run_dir.result, run_dir.events, run_dir.training, run_dir.jobs, run_dir.path)
    times = [os.lstat(path).st_mtime for path in paths if os.path.lexists(path)]
    return max(times)


def _leftovers() -> Iterator[Removal]:
    """Yield what an interrupted prune has left."""
    root = os.path.realpath(runs_dir())
    for path in _folders(root):
        name = os.path.basename(path)
        if name.startswith(DOOMED) and (size := measure(path)) is not None:
            yield Removal(name=name, paths=(path,), size_bytes=size, age_s=0.0, is_whole=True)


def _cache(older_s: float, now: float) -> Iterator[Removal]:
    """Yield zipapps that were unused for that long; they are made again when needed."""
    folder = os.path.join(os.path.realpath(muster_home()), "cache")
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                used_at = max(facts.st_atime, facts.st_mtime)
                is_zipapp = entry.name.endswith((".pyz", ".zip")) and stat.S_ISREG(facts.st_mode)
                if is_zipapp and now - used_at > older_s:
                    found.append((entry.path, facts.st_blocks * 512))
    except OSError:
        return
    yield from _removed_together("cache", found, age_s=older_s)


def _archives(older_s: float, now: float, most_bytes: int | None) -> Iterator[Removal]:
    """Yield old archives of environments; runs keep theirs open, jobs have a hard link."""
    cache = os.path.join(os.path.realpath(muster_home()), "cache")
    found, total = [], 0
    for path in kept_archives(cache):
        facts = os.lstat(path)
        total += facts.st_size
        if now - facts.st_mtime > older_s or (most_bytes is not None and total > most_bytes):
            found.append((path, facts.st_blocks * 512))
            total -= facts.st_size
    yield from _removed_together("archives", found, age_s=0.0)


def _environments(older_s: float, most_bytes: int | None) -> Iterator[Removal]:
    """Yield unused environments that were sent to this machine."""
    found = shelf.old_ones(shelf.find_folder(), older_s, most_bytes)
    age_s = min((kept.age_s for kept, _ in found), default=0.0)
    yield from _removed_together(ENVIRONMENTS, [(one.path, size) for one, size in found], age_s)


def _removed_together(
    name: str, found: Sequence[tuple[str, int]], age_s: float
) -> Iterator[Removal]:
    """Yield one removal of these files and their sizes; nothing if there are none."""
    if found:
        paths = tuple(path for path, _ in found)
        size = sum(size for _, size in found)
        yield Removal(name=name, paths=paths, size_bytes=size, age_s=age_s, is_whole=False)


def _folders(path: str) -> list[str]:
    """Return the folders in a folder, sorted, without links; none in a link."""
    if os.path.islink(path):
        return []
    try:
        with os.scandir(path) as entries:
            return sorted(e.path for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return []
