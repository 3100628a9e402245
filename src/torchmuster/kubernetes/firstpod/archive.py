"""Gets the code archive to the first pod: from a Secret, an earlier run's volume, or the client."""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable

from torchmuster.core.files import atomic
from torchmuster.core.model.text import show_transfer
from torchmuster.errors import MusterError
from torchmuster.kubernetes.node import order as orders
from torchmuster.kubernetes.node.keep import arriving_folder
from torchmuster.kubernetes.node.order import PodOrder

_LOOK_S = 0.1
_SAY_EVERY_S = 4.5
_MOST_KEPT = 8


def wait_for_archive(
    order: PodOrder, brought: str, limit_s: float, say: Callable[[str], None]
) -> None:
    """Put the code archive into its place.

    Args:
        order: The order of the pods.
        brought: The folder with the files from Secrets.
        limit_s: How long the client may take to send the archive.
        say: Tells the user what the pod waits for.

    Raises:
        MusterError: The archive did not come within `limit_s`.
    """
    came = os.path.join(brought, orders.CODE_FILE)
    if os.path.exists(came):
        with open(came, "rb") as file:
            atomic.replace_file(order.archive, file.read())
        return
    if order.kept is not None and _use_kept(order, order.kept):
        return
    begun = say_at = time.monotonic()
    while not _is_whole(order.archive, order):
        now = time.monotonic()
        if now >= say_at:
            say(f"waiting for the code: the client sends it{_how_far(order, now - begun)}")
            say_at = now + _SAY_EVERY_S
        if now - begun > limit_s:
            raise MusterError(
                "the code did not come",
                where=order.archive,
                why="it is too large for Secrets, so the client sends it when the first pod runs",
                fix="keep muster running until it says that training begins, or put the code on a volume",
            )
        threading.Event().wait(_LOOK_S)
    if order.kept is not None:
        with contextlib.suppress(
            OSError
        ):  # on a full volume only the next run loses: it has to send the code again
            _keep(order, order.kept)


def _how_far(order: PodOrder, elapsed_s: float) -> str:
    """Return how much of the archive has arrived; empty for nothing."""
    done = 0
    with contextlib.suppress(OSError):
        done = os.path.getsize(os.path.join(arriving_folder(order), orders.CODE_FILE))
    return f": {show_transfer(done, order.code_bytes, elapsed_s)}" if done else ""


def _use_kept(order: PodOrder, kept: str) -> bool:
    """Use the archive that an earlier run left on the volume; remove a damaged one.

    Raises:
        MusterError: It is damaged; the client saw it there, so it does not send it in this run.
    """
    if not os.path.exists(kept):
        return False
    if not _is_whole(kept, order):
        os.unlink(kept)
        raise MusterError(
            "the code that an earlier run left on the volume is damaged",
            where=kept,
            why="its content is not what its name says: it has been removed",
            fix="start the run again: it sends the code",
        )
    _link(kept, order.archive)
    os.utime(kept)  # the newest archives are kept
    return True


def _keep(order: PodOrder, kept: str) -> None:
    """Keep the archive for later runs, together with the newest others."""
    folder = os.path.dirname(kept)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _link(order.archive, kept)
    with os.scandir(folder) as entries:
        found = [e.path for e in entries if e.name.startswith(orders.KEPT_PREFIX)]
    for path in sorted(found, key=os.path.getmtime)[:-_MOST_KEPT]:
        os.unlink(path)


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the volume has no hard links."""
    part = f"{target}.{os.uname().nodename}.{os.getpid()}"
    try:
        os.link(source, part)
    except OSError:
        with open(source, "rb") as file:
            atomic.replace_file(part, file.read())
    os.replace(part, target)


def _is_whole(path: str, order: PodOrder) -> bool:
    try:
        if os.path.getsize(path) != order.code_bytes:
            return False
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == order.code_sha
    except OSError:
        return False
