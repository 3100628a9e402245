"""Once per node, or once per run: one process does the work, the others wait for its marker.

    <name>.done        the work was finished; it stays, so the next run need not do it again
    <name>.lock        exclusive creation plus a lease: its owner renews it every 2 s
    <name>.failed      the exception of the process that tried; raised in all that wait for it

Outside any collective, so that one slow node holds nobody in a process group with a time-out, and
without flock, which fails on some shared file systems. A lock whose owner is dead, or has not renewed
it for 15 s, is taken over.
"""

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torchmuster import proc
from torchmuster.errors import MusterError, UsageError
from torchmuster.files import atomic

LEASE_S = 15.0
_RENEW_S = 2.0
_POLL_S = 0.1
_SAY_EVERY_S = 5.0


class OnceError(MusterError):
    """The one process that was to do the work failed."""

    exit_code = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class OncePlace:
    """Where a piece of work is agreed on.

    Attributes:
        folder: Visible to all who share the work.
        token: The same for all processes of one attempt, another one for the next: a failure of an
            earlier attempt is tried again.
        say: Prints a line.
    """

    folder: str
    token: str
    say: Callable[[str], None]
    timeout_s: float = 3600.0


@contextmanager
def once(name: str, place: OncePlace) -> Iterator[bool]:
    """Yield True in the one process that has to do the work; elsewhere wait, then yield False.

    Raises:
        OnceError: The process that did the work failed, or `timeout_s` went by.
        UsageError: The name can't be a file's.
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
        _note_failure(stem, place, error)
        raise
    else:
        atomic.write_json(f"{stem}.done", {"host": socket.gethostname(), "pid": os.getpid()})
    finally:
        lock.release()


def _note_failure(stem: str, place: OncePlace, error: BaseException) -> None:
    words = f"{type(error).__name__}: {error}"[:2000]
    with suppress(OSError):
        atomic.write_json(f"{stem}.failed", {"token": place.token, "error": words})


def _acquire(stem: str, place: OncePlace) -> "_Lock | None":
    """Return the lock, or None when the work is done."""
    began = said = time.monotonic()
    watched = _Watched()
    while True:
        if os.path.exists(f"{stem}.done"):
            return None
        _raise_failure(stem, place)
        lock = _Lock.take(stem)
        if lock is not None:
            return _look_again(lock, stem, place)
        owner = watched.look(f"{stem}.lock")
        if owner.is_dead:
            _break(stem, owner)
            place.say(f"`{os.path.basename(stem)}`: {owner.name} has gone; another takes its place")
            continue
        now = time.monotonic()
        if now - began > place.timeout_s:
            raise OnceError(
                f"`{os.path.basename(stem)}` was not finished within {place.timeout_s:g} s",
                where=f"{stem}.lock",
                why=f"{owner.name} still works on it",
            )
        if now - said > _SAY_EVERY_S:
            said = now
            place.say(
                f"waiting for {owner.name} to finish `{os.path.basename(stem)}`"
                f" ({now - began:.0f} s)"
            )
        threading.Event().wait(_POLL_S)


def _look_again(lock: "_Lock", stem: str, place: OncePlace) -> "_Lock | None":
    """Give the lock back when another finished or failed just before we took it."""
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
            f"`{os.path.basename(stem)}` failed in the process that was to do it for all",
            where=f"{stem}.failed",
            why=str(failed.get("error")),
        )


def _break(stem: str, owner: "_Owner") -> None:
    """Remove a dead owner's lock; of several that try, the rename lets one succeed."""
    doomed = f"{stem}.lock.{uuid.uuid4().hex[:8]}"
    with suppress(OSError):
        if atomic.read_json(f"{stem}.lock") == owner.card:
            os.rename(f"{stem}.lock", doomed)
            os.unlink(doomed)


@dataclass(frozen=True, slots=True)
class _Owner:
    name: str
    card: Any
    is_dead: bool


class _Watched:
    """Judges a lock by its owner's process where we can see it, else by its renewals.

    Renewals are counted by our own clock: the file server's may be minutes off.
    """

    def __init__(self) -> None:
        self._stamp: tuple[int, int] | None = None
        self._since = time.monotonic()

    def look(self, path: str) -> _Owner:
        card = atomic.read_json(path)
        try:
            status = os.stat(path)
            stamp = (status.st_mtime_ns, status.st_ino)
        except OSError:
            stamp = (0, 0)
        now = time.monotonic()
        if stamp != self._stamp:
            self._stamp, self._since = stamp, now
        if not isinstance(card, dict):
            return _Owner("another process", card, now - self._since > LEASE_S)
        name = f"pid {card.get('pid')} on {card.get('host')}"
        here = card.get("boot") == _boot_id() and card.get("host") == socket.gethostname()
        if here:
            facts = proc.read_process(int(card.get("pid", 0)))
            if facts is None or facts.state in ("Z", "X") or facts.start_ticks != card.get("start"):
                return _Owner(name, card, is_dead=True)
        return _Owner(name, card, now - self._since > LEASE_S)


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
            "boot": _boot_id(),
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
            if atomic.read_json(self._path) == self._card:  # else it was taken from us
                os.unlink(self._path)

    def _renew(self) -> None:
        while not self._over.wait(_RENEW_S):
            with suppress(OSError):
                os.utime(self._path)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
