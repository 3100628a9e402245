"""Once per node, or once per run: one process does the work, the others wait for its marker.

    <name>.done        the work is finished; it stays, so the next run need not repeat the work
    <name>.lock        exclusive creation plus a lease: its owner renews it every 2 s
    <name>.lock.<id>   the right to remove the lock of that id, held for a moment
    <name>.failed      the exception of the process that tried; raised in all that wait for it

No collective is used, so a slow node does not block a process group with a time-out; and no flock,
which fails on some shared file systems. A lock is taken over when its owner's process is gone, if
that is visible from here, otherwise when it was not renewed for 15 s.
"""

import json
import os
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.errors import MusterError, UsageError

LEASE_S = 15.0
_RENEW_S = 2.0
_POLL_S = 0.1
_SAY_EVERY_S = 5.0


class OnceError(MusterError):
    """The process that did the work failed."""

    exit_code = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class OncePlace:
    """The folder and the limits for one piece of work.

    Attributes:
        folder: Visible to all processes that share the work.
        token: The same for all processes of one attempt, different in the next: work that failed in
            an
            earlier attempt is tried again.
        say: Called with a line to print.
        timeout_s: How long the other processes wait for the work.
        lease_s: Time after which a lock that was not renewed is taken over.
    """

    folder: str
    token: str
    say: Callable[[str], None]
    timeout_s: float = 3600.0
    lease_s: float = LEASE_S


def folder_of(
    per: str, folder: str | None, of_run: str, run_id: str, token: str, node_rank: int
) -> str:
    """Return the folder of the markers for a piece of work; `World.once` documents the arguments.

    Raises:
        UsageError: `per` is neither `node` nor `run`.
    """
    if per not in ("node", "run"):
        raise UsageError(f"per={per!r}: `node` or `run`", where="World.once")
    if per == "run":
        return folder or os.path.join(of_run, "once")
    # torchrun names every run `none` by default.
    return folder or node_folder(token if run_id in ("", "none") else run_id, node_rank)


def node_folder(run_id: str, node_rank: int) -> str:
    """Return the folder of a run's markers on this node, accessible to this user only.

    Raises:
        OnceError: It can't be created, or it belongs to another user.
    """
    scratch = os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    safe = "".join(c if c.isalnum() else "-" for c in run_id)
    base = os.path.join(scratch, f"muster-once-{os.getuid()}-{safe}")
    try:
        os.makedirs(base, mode=0o700, exist_ok=True)
        owner = os.stat(base).st_uid
    except OSError as error:
        raise OnceError("no folder for markers", where=base, why=error.strerror) from error
    if owner != os.getuid():  # anyone could have created it in a shared temporary folder
        raise OnceError(
            "the folder for markers belongs to somebody else",
            where=base,
            why=f"its owner is user {owner}",
            fix="choose another one: tm.once(..., folder=...)",
        )
    # Simulated nodes on one machine share a temporary folder, but each does its own work.
    return os.path.join(base, f"node-{node_rank}")


@contextmanager
def once(name: str, place: OncePlace) -> Iterator[bool]:
    """Yield True in the process that has to do the work; in the others wait, then yield False.

    Raises:
        OnceError: The process that did the work failed, or `timeout_s` has passed.
        UsageError: The name is not a valid file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(f"`{name}` can't name a marker file", fix="use letters, digits, . _ -")
    try:
        os.makedirs(place.folder, exist_ok=True)
    except OSError as error:
        raise OnceError(
            "the folder of the markers can't be made", where=place.folder, why=error.strerror
        ) from error
    stem = os.path.join(place.folder, name)
    lock = _acquire(stem, place)
    if lock is None:
        yield False
        return
    try:
        yield True
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"[:2000]
        with suppress(OSError):
            atomic.write_json(f"{stem}.failed", {"token": place.token, "error": words})
        raise
    else:
        atomic.write_json(f"{stem}.done", {"host": socket.gethostname(), "pid": os.getpid()})
    finally:
        lock.release()


def _acquire(stem: str, place: OncePlace) -> "_Lock | None":
    """Return the lock, or None if the work is done."""
    began = said = time.monotonic()
    watched = _Watched(f"{stem}.lock", place.lease_s)
    while True:
        if os.path.exists(f"{stem}.done"):
            return None
        _raise_failure(stem, place)
        lock = _Lock.take(stem)
        if lock is not None:
            return _look_again(lock, stem, place)
        owner = watched.look()
        if owner.is_dead and watched.remove(owner):
            place.say(
                f"`{os.path.basename(stem)}`: {owner.name} is gone; another process takes over"
            )
            continue
        now = time.monotonic()
        if now - began > place.timeout_s:
            raise OnceError(
                f"`{os.path.basename(stem)}` was not finished within {place.timeout_s:g} s",
                where=f"{stem}.lock",
                why=f"{owner.name} is still working on it",
            )
        if now - said > _SAY_EVERY_S:
            said = now
            place.say(
                f"waiting for {owner.name} to finish `{os.path.basename(stem)}`"
                f" ({now - began:.0f} s)"
            )
        threading.Event().wait(_POLL_S)


def _look_again(lock: "_Lock", stem: str, place: OncePlace) -> "_Lock | None":
    """Give the lock back if another process finished or failed just before we took it."""
    try:
        done = os.path.exists(f"{stem}.done")
        _raise_failure(stem, place)
    except BaseException:
        lock.release()
        raise
    if done:
        lock.release()
        return None
    return lock


def _raise_failure(stem: str, place: OncePlace) -> None:
    failed = atomic.read_json(f"{stem}.failed")
    if isinstance(failed, dict) and failed.get("token") == place.token:
        raise OnceError(
            f"`{os.path.basename(stem)}` failed in the process that did it for all",
            where=f"{stem}.failed",
            why=str(failed.get("error")),
        )


@dataclass(frozen=True, slots=True)
class _Owner:
    name: str
    mark: str | None  # identifies this lock; None without a lock
    is_dead: bool


class _Watched:
    """Judges a lock by its owner's process if that is visible from here, else by its renewals.

    Renewals are timed by our own clock: the file server's may be minutes off.
    """

    def __init__(self, path: str, lease_s: float) -> None:
        self._path = path
        self._lease_s = lease_s
        self._stamp: tuple[int, int] | None = None
        self._since = time.monotonic()
        self._right_since: dict[str, float] = {}

    def look(self) -> _Owner:
        card = atomic.read_json(self._path)
        try:
            status = os.stat(self._path)
        except OSError:
            return _Owner("another process", None, is_dead=False)
        now = time.monotonic()
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            self._stamp, self._since = stamp, now
        is_stale = now - self._since > self._lease_s
        if not isinstance(card, dict):  # half written: its owner is still writing, or was killed
            return _Owner("another process", f"inode-{status.st_ino}", is_stale)
        name = f"pid {card.get('pid')} on {card.get('host')}"
        if card.get("start") is not None and card.get("table") == _process_table():
            facts = proc.read_process(int(card.get("pid", 0)))
            gone = facts is None or not facts.can_run
            is_stale = gone or (facts is not None and facts.start_ticks != card["start"])
        return _Owner(name, str(card.get("id")), is_stale)

    def remove(self, owner: _Owner) -> bool:
        """Remove a dead owner's lock; return whether this process removed it."""
        if owner.mark is None:
            return False
        removed = _remove_lock(self._path, owner.mark)
        if removed is None:  # another process is removing it, or was killed meanwhile
            since = self._right_since.setdefault(owner.mark, time.monotonic())
            if time.monotonic() - since > self._lease_s:
                del self._right_since[owner.mark]
                with suppress(OSError):
                    os.unlink(f"{self._path}.{owner.mark}")
        return bool(removed)


def _mark_of(path: str) -> str | None:
    """Return an identifier of this lock that no earlier or later lock of this name has."""
    card = atomic.read_json(path)
    if isinstance(card, dict):
        return str(card.get("id"))
    with suppress(OSError):
        return f"inode-{os.stat(path).st_ino}"
    return None


def _remove_lock(path: str, mark: str) -> bool | None:
    """Remove the lock with this mark, if it still exists; None: another process has the right to.

    Between checking and removing, the lock may have become that of another process. While we hold
    the right to remove this lock, no other process can remove it and make room for a new one.
    """
    right = f"{path}.{mark}"
    try:
        os.close(os.open(right, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return None
    try:
        if _mark_of(path) != mark:
            return False
        os.unlink(path)
        return True
    finally:
        os.unlink(right)


class _Lock:
    """A lock that we hold; a thread renews it."""

    def __init__(self, path: str, card: dict[str, Any]) -> None:
        self._path = path
        self._card = card
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="muster-once", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, stem: str) -> "_Lock | None":
        path = f"{stem}.lock"
        facts = proc.read_process(os.getpid())
        card = {
            "host": socket.gethostname(),
            "table": _process_table(),
            "pid": os.getpid(),
            "start": facts.start_ticks if facts else None,
            "id": uuid.uuid4().hex,
        }
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        with os.fdopen(fd, "w") as file:
            json.dump(card, file)
        return cls(path, card)

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        with suppress(OSError):
            _remove_lock(self._path, self._card["id"])  # unless it was taken over

    def _renew(self) -> None:
        while not self._over.wait(_RENEW_S):
            with suppress(OSError):
                if _mark_of(self._path) == self._card["id"]:
                    os.utime(self._path)


def _process_table() -> str:
    """Return an identifier that two processes share if each can look up the other's pid."""
    return proc.boot_id() or f"unknown, of {socket.gethostname()} {os.getpid()}"
