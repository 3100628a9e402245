"""Unpacks the environment of a job from a file that all of its nodes see: a program for agents, which must not wait for disks."""

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchmuster.core.model import codec
from torchmuster.core.model.plan import ShippedEnvironment, UnpackOrder
from torchmuster.errors import MusterError
from torchmuster.launcher.files.environment import ParcelError, ParcelFile
from torchmuster.launcher.node.shipping.shelf import Shelf, Unpacking, check_fit, try_torch

_SAY_EVERY_S = 0.25


def unpack(
    shipped: ShippedEnvironment, parent: str, *, tries: bool, tell: Callable[[int, int], None]
) -> str:
    """Return the folder of the environment on this node; what is there already is used.

    Args:
        shipped: The environment.
        parent: The scratch folder of the node.
        tries: Import torch in it when it is new here.
        tell: Hears how many bytes of how many are read.

    Raises:
        MusterError: It can't be had here.
    """
    needs = shipped.needs
    check_fit(needs)
    shelf = Shelf(needs, parent)
    if shelf.take():
        return shelf.path
    with _alone(
        shelf
    ):  # of several agents of a node, or of nodes that share the folder, one unpacks
        if shelf.take():
            return shelf.path
        shelf.check_room()
        try:
            _read(shipped, Unpacking(shelf), tell)
        except (OSError, ParcelError) as error:
            raise MusterError(
                "the environment can't be unpacked", where=shipped.archive, why=str(error)
            ) from error
        if tries:
            try_torch(shelf.path, needs)
    return shelf.path


def _read(
    shipped: ShippedEnvironment, unpacking: Unpacking, tell: Callable[[int, int], None]
) -> None:
    needs, said_at = shipped.needs, 0.0
    with contextlib.closing(unpacking):
        parcel = ParcelFile(shipped.archive, needs.sha, needs.num_pieces)
        with contextlib.closing(parcel):
            for index, piece in enumerate(parcel.pieces):
                unpacking.feed(piece.content(parcel.piece(index)))
                if time.monotonic() - said_at > _SAY_EVERY_S:
                    said_at = time.monotonic()
                    tell(parcel.offset(index), needs.size_bytes)
        unpacking.finish()


@contextlib.contextmanager
def _alone(shelf: Shelf) -> Iterator[None]:
    """Let the others who want the same wait; where the file system has no locks, each unpacks its own and the first stays."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(shelf.folder, f".lock-{shelf.needs.sha[:16]}"), flags, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def main(arguments: list[str]) -> int:
    """Unpack what the agent asks for; say on standard output how it goes."""
    order = codec.from_word(UnpackOrder, arguments)
    shipped = order.shipped

    def say(kind: str, value: Any) -> None:
        sys.stdout.write(json.dumps({kind: value}) + "\n")
        sys.stdout.flush()

    def tell(done: int, total: int) -> None:
        say("progress", {"source": shipped.archive, "bytes_done": done, "total_bytes": total})

    try:
        path = unpack(shipped, order.parent, tries=order.tries, tell=tell)
    except MusterError as error:
        say("error", error.parts())
        return 1
    say("done", {"path": path})
    return 0
