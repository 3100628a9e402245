"""The folder where heads claim terms and agents vote that one is lost (`launcher/model/succession.py`).

It may be on a network file system. A claim is written first and then linked, which only one process
can do for each number. NFS clients cache a directory's listing for up to a minute unless they see
it change, so a reader creates and removes a file first.
"""

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.plainfile import open_own

_TERM = re.compile(r"term-(\d{1,9})\.json")
_VOTE = re.compile(r"lost-(\d{1,9})\.(\d{1,6})")
_HEAD = re.compile(r"head-(\d{1,9})\.json")
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_BYTES = 1 << 20
_ODD = (errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.EPERM, errno.EACCES)
_VOID_S = 10.0  # a claim is completely written by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A claimed term: what the next head has to know.

    Attributes:
        number: Number of the term.
        holder: Random id of the claimant, shared by later heads of the same owner.
        place: Place of the agent with the head.
        node: Its node's name in the engine.
        members: Places of its agents: a majority of them may vote it out.
        next_attempt: The first attempt number that no earlier term has started.
        restarts_spent: Restarts that the run has spent.
    """

    number: int
    holder: str
    place: int
    node: str
    members: tuple[int, ...]
    next_attempt: int
    restarts_spent: int


class Claims:
    """The claims and votes of one run.

    Args:
        folder: Created by the run's first owner.

    Attributes:
        damaged: Path of the newest claim, if unreadable; after some seconds it counts as nobody's.
    """

    def __init__(self, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self.damaged: str | None = None
        self._damaged_since: dict[int, float] = {}

    @property
    def estate(self) -> str:
        """Return the path of the file that the first owner leaves for its successor."""
        return os.path.join(self.folder, "estate.json")

    @property
    def has_heirs(self) -> bool:
        """Say whether an agent of this run may become its head."""
        return os.path.exists(self.estate)

    def newest(self, *, fresh: bool = True) -> Term | None:
        """Return the newest readable claim; None before the first.

        Args:
            fresh: Bypass the cached listing.

        Raises:
            OSError: The folder can't be read.
        """
        names = self._names() if fresh else os.listdir(self.folder)
        numbers = sorted(int(match[1]) for name in names if (match := _TERM.fullmatch(name)))
        void = None
        while numbers:
            number = numbers.pop()
            claim = self.read(number)
            if claim is not None:
                # A damaged term stays claimed, so the next one follows it, as after a claimant that
                # died.
                return claim if void is None else replace(claim, number=void)
            if self._clock() - self._damaged_since.setdefault(number, self._clock()) < _VOID_S:
                return None
            void, self.damaged = void if void is not None else number, self._path(number)
        return None

    def head_node(self) -> str:
        """Return the node of the newest claim, as part of a sentence."""
        try:
            newest = self.newest()
        except OSError:
            newest = None
        return newest.node if newest is not None else "another node"

    def take(self, claim: Term) -> bool:
        """Claim a term; return False if another process has it.

        Raises:
            OSError: The folder can't be written to.
        """
        path = self._path(claim.number)
        data = json.dumps(codec.to_plain(claim)).encode()
        temporary = f"{path}.{os.urandom(8).hex()}.tmp"
        try:
            atomic.write_synced(temporary, data, mode=0o600, flags=os.O_EXCL)
            self._link(temporary, path, data)
        except FileExistsError:
            # The reply to our own link may have been lost, and the link retried.
            return self.read(claim.number) == claim
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return True

    def _link(self, temporary: str, path: str, data: bytes) -> None:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Without links it is not complete at once; a reader of half a claim retries.
            atomic.write_synced(path, data, mode=0o600, flags=os.O_EXCL)

    def votes(self, number: int, *, fresh: bool = True) -> frozenset[int]:
        """Return the places whose agents have voted that the head of a term is lost."""
        names = self._names() if fresh else os.listdir(self.folder)
        matches = (_VOTE.fullmatch(name) for name in names)
        return frozenset(int(m[2]) for m in matches if m is not None and int(m[1]) == number)

    def vote(self, number: int, place: int) -> None:
        """Record that the agent of a place has lost the head of a term."""
        os.close(os.open(self._vote(number, place), os.O_WRONLY | os.O_CREAT, 0o600))

    def withdraw(self, number: int, place: int) -> None:
        """Withdraw the vote of a place."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._vote(number, place))

    def _names(self) -> list[str]:
        path = os.path.join(self.folder, f"look-{os.urandom(8).hex()}")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(path)
        return os.listdir(self.folder)

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, f"term-{number}.json")

    def _vote(self, number: int, place: int) -> str:
        return os.path.join(self.folder, f"lost-{number}.{place}")

    def read(self, number: int) -> Term | None:
        """Return the claim of a term; None if it is incomplete or invalid.

        Raises:
            OSError: It can't be read right now.
        """
        try:
            with open_own(self._path(number)) as file:
                claim = codec.from_plain(Term, json.loads(file.read(_MOST_BYTES)))
        except (ValueError, RecursionError):
            return None
        except OSError as error:
            if error.errno in _ODD:
                return None
            raise
        return claim if claim.number == number else None

    def announce(self, number: int, addresses: Sequence[str]) -> None:
        """Write where the head of a term listens, one file per term, so no old head overwrites it.

        Raises:
            OSError: It can't be written.
        """
        atomic.write_json(os.path.join(self.folder, f"head-{number}.json"), list(addresses))

    def forget_heads(self) -> None:
        """Remove the addresses of heads of an earlier job."""
        for name in os.listdir(self.folder):
            if _HEAD.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.folder, name))

    def announced(self, *, fresh: bool) -> tuple[int, Any] | None:
        """Return the newest term whose head has announced addresses, and these; None without one.

        Raises:
            OSError: The folder can't be read.
        """
        names = self._names() if fresh else os.listdir(self.folder)
        numbers = [int(match[1]) for name in names if (match := _HEAD.fullmatch(name))]
        if not numbers:
            return None
        endpoints = atomic.read_json(os.path.join(self.folder, f"head-{max(numbers)}.json"))
        return max(numbers), endpoints
