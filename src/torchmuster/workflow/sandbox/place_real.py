"""Create and remove task files at their real paths, on machines without namespaces.

Every file is created exclusively, so nothing that existed is ever changed. A claim record is
written before the first file. After a `kill -9`, the next start or `clean_up` removes only what the
record names: the same inode, or the same content if the record had not got that far.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Sequence
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files.atomic import read_json, write_json
from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.sandbox.place import write_new
from torchmuster.workflow.sandbox.place_plan import (
    PlacedFile,
    nearest_directory,
    problem_of_path,
    refuse,
)

_MAX_COMPARED_BYTES = 16 << 20


class RealPathFiles:
    """The files of one task at their real paths.

    Attributes:
        record: The claim record's path.
    """

    def __init__(self, task: str, claims: str) -> None:
        """Take the task's name, and the folder of claim records that all tasks of a run share."""
        self._task = task
        self._claims = claims
        self.record = os.path.join(claims, hashlib.sha256(task.encode()).hexdigest()[:16] + ".json")

    def place(self, files: Sequence[PlacedFile]) -> None:
        """Create all files or none.

        Raises:
            UsageError: Paths can't be used, or exist already; the message names every one.
            MusterError: The file system refused.
        """
        self._remove_stale_claims()
        clean_up(self.record)  # the files of an earlier attempt: a task has one set
        refuse(self._problems(files))
        claim = self._claim(files)
        write_json(self.record, claim, mode=0o600)
        try:
            for directory in claim["directories"]:
                os.mkdir(directory["path"], 0o755)
                directory["inode"] = _identity(os.lstat(directory["path"]))
            for file, entry in zip(files, claim["files"], strict=True):
                entry["inode"] = _identity(write_new(entry["path"], file.content, file.mode))
            write_json(self.record, claim, mode=0o600)
        except OSError as error:
            _remove(claim, made_only=True)
            os.unlink(self.record)
            raise MusterError(
                "the task's files can't be created", where=error.filename, why=error.strerror
            ) from error

    def remove(self) -> list[str]:
        """Remove the files that were placed; return the paths that others have replaced."""
        return clean_up(self.record)

    def _problems(self, files: Sequence[PlacedFile]) -> list[str]:
        problems: list[str] = []
        seen: set[str] = set()
        for file in files:
            real = os.path.realpath(file.path)
            problem = problem_of_path(file.path)
            if problem is None and real in seen:
                problem = "is placed twice"
            elif problem is None and os.path.lexists(real):
                problem = f"exists already: {self._owner(real)}"
            elif problem is None and not os.path.isdir(nearest_directory(real)):
                problem = f"can't be placed: `{nearest_directory(real)}` is not a directory"
            seen.add(real)
            if problem is not None:
                problems.append(f"`{file.path}` {problem}")
        parents = {os.path.realpath(file.path) for file in files}
        problems += [
            f"`{path}` lies below `{above}`, which is a file"
            for path in sorted(parents)
            for above in sorted(parents)
            if path.startswith(above + "/")
        ]
        return problems

    def _owner(self, path: str) -> str:
        for claim in self._other_claims():
            if any(entry["path"] == path for entry in claim["files"]):
                return f"task `{claim['task']}` of this run has placed it"
        return "it was there before"

    def _other_claims(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            names = [os.path.join(self._claims, name) for name in sorted(os.listdir(self._claims))]
            records = [read_claim(path) for path in names if path != self.record]
            return [claim for claim in records if claim is not None]
        return []

    def _remove_stale_claims(self) -> None:
        os.makedirs(self._claims, mode=0o700, exist_ok=True)
        for name in sorted(os.listdir(self._claims)):
            claim = read_claim(os.path.join(self._claims, name))
            if claim is not None and not _owner_lives(claim):
                clean_up(os.path.join(self._claims, name))

    def _claim(self, files: Sequence[PlacedFile]) -> dict[str, Any]:
        paths = [os.path.realpath(file.path) for file in files]
        missing: set[str] = set()
        for path in paths:
            parent = os.path.dirname(path)
            while not os.path.isdir(parent):
                missing.add(parent)
                parent = os.path.dirname(parent)
        facts = proc.read_process(os.getpid())
        return {
            "task": self._task,
            "boot": proc.boot_id(),
            "pid": os.getpid(),
            "start_ticks": facts.start_ticks if facts else 0,
            "directories": [
                {"path": path, "inode": None}
                for path in sorted(missing, key=lambda one: one.count("/"))
            ],
            "files": [
                {"path": path, "inode": None, "sha256": hashlib.sha256(file.content).hexdigest()}
                for path, file in zip(paths, files, strict=True)
            ],
        }


def clean_up(record: str) -> list[str]:
    """Remove a claim record and the files that it names; return the paths left alone.

    A path is left alone when it is no longer what the record's task made: it has another inode or
    owner, or is a directory that is not empty.

    Raises:
        UsageError: The file is not a claim record.
    """
    claim = read_claim(record)
    if claim is None:
        if not os.path.lexists(record):
            return []
        raise UsageError(f"`{record}` is not a claim record", fix="remove it by hand")
    left = _remove(claim)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record)
    return left


def read_claim(record: str) -> dict[str, Any] | None:
    """Return a claim record; None if it is missing, incomplete or another user's."""
    try:
        if os.lstat(record).st_uid != os.geteuid():
            return None
        value = read_json(record)
        for entry in [*value["files"], *value["directories"]]:
            if not isinstance(entry["path"], str):
                return None
        return value if isinstance(value["task"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _owner_lives(claim: dict[str, Any]) -> bool:
    facts = proc.read_process(int(claim.get("pid", 0)))
    same = facts is not None and facts.start_ticks == claim.get("start_ticks")
    return bool(same and claim.get("boot") == proc.boot_id())


def _remove(claim: dict[str, Any], *, made_only: bool = False) -> list[str]:
    left: list[str] = []
    for entry in claim["files"]:
        if made_only and entry["inode"] is None:
            continue
        if not _is_ours(entry):
            left += [entry["path"]] if os.path.lexists(entry["path"]) else []
            continue
        with contextlib.suppress(OSError):
            os.unlink(entry["path"])
    for entry in reversed(claim["directories"]):
        if made_only and entry["inode"] is None:
            continue
        try:
            if entry["inode"] in (None, _identity(os.lstat(entry["path"]))):
                os.rmdir(entry["path"])  # removes only empty ones
        except FileNotFoundError:
            continue
        except OSError:
            left.append(entry["path"])
    return left


def _is_ours(entry: dict[str, Any]) -> bool:
    try:
        facts = os.lstat(entry["path"])
        if entry["inode"] is not None:
            return bool(entry["inode"] == _identity(facts))
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return False
        # Killed before the record got the file's inode: compare the content.
        with open(entry["path"], "rb") as file:
            content = file.read(_MAX_COMPARED_BYTES)
    except OSError:
        return False
    return bool(hashlib.sha256(content).hexdigest() == entry["sha256"])


def _identity(facts: os.stat_result) -> list[int]:
    # The kernel soon reuses the inode number of a removed file, and the birth time is not
    # portable, so owner and type count too.
    return [facts.st_dev, facts.st_ino, facts.st_uid, stat.S_IFMT(facts.st_mode)]
