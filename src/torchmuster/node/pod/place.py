"""Puts what a group needs into a pod's run directory: the plan, the code, and the outputs that its tasks read.

The archive is in a Secret, or comes on standard input. With `check` nothing is read, and the exit code is 3 where it has still
to come. A first pod that was made again and found no record begins anew: what its predecessor's tasks left here is removed.
"""

import os
import shutil
from dataclasses import dataclass

from torchmuster.files import atomic, code_copy
from torchmuster.model.codec import from_words
from torchmuster.node.pod.order import (
    CODE_FILE,
    KEY_FILE,
    NODES_FILE,
    WORKFLOW_FILE,
    PodOrder,
    read_order,
)
from torchmuster.node.pod.outputs import TASKS_FOLDER, take_outputs
from torchmuster.node.remote.files import make_mark, mark_of

LACKS_CODE = 3
_LIMIT_BYTES = 2 * (code_copy.MAX_CODE_BYTES + code_copy.MAX_OUTPUT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceWords:
    """The command line of `pod-place`: the file of the pod's order, the mark of the head's folder, whether to look only."""

    order: str
    head: str
    check: bool = False


def main(arguments: list[str]) -> int:
    """Place what comes."""
    words = from_words(PlaceWords, arguments)
    order = read_order(words.order)
    if placed_by(order) == words.head:
        return 0
    came = os.path.join(os.path.dirname(words.order), CODE_FILE)
    is_brought = os.path.exists(came)
    if words.check and not is_brought:
        return LACKS_CODE
    shutil.rmtree(order.run_dir.path, ignore_errors=True)
    os.makedirs(order.folder, mode=0o700, exist_ok=True)
    part = f"{order.archive}.{os.getpid()}"
    with open(part, "wb") as file, open(came if is_brought else 0, "rb") as source:
        shutil.copyfileobj(source, file, 1 << 20)
    os.replace(part, order.archive)
    place(order, os.path.dirname(words.order), words.head)
    return 0


def is_placed(order: PodOrder) -> bool:
    """Say whether this pod has what its group needs."""
    return os.path.exists(order.stamps)


def placed_by(order: PodOrder) -> str:
    """Return the mark of the head that has put it here."""
    noted = atomic.read_json(order.stamps)
    return str(noted.get("head")) if isinstance(noted, dict) else ""


def place(order: PodOrder, brought: str, head: str | None = None) -> None:
    """Unpack the archive that has come; `head` is the mark of the head's pod, None for this one.

    Raises:
        OSError: There is no room.
        ValueError: It is damaged.
    """
    run_dir = order.run_dir
    os.makedirs(os.path.join(run_dir.path, "logs", "agents"), mode=0o700, exist_ok=True)
    came = os.path.join(order.folder, "came")
    shutil.rmtree(came, ignore_errors=True)
    os.makedirs(came)
    with open(order.archive, "rb") as file:
        code_copy.read_archive(file, came, _LIMIT_BYTES)
    take_outputs(run_dir, came)
    shutil.rmtree(os.path.join(came, TASKS_FOLDER), ignore_errors=True)
    for name, target in (
        (WORKFLOW_FILE, os.path.join(came, WORKFLOW_FILE)),
        (NODES_FILE, run_dir.group(order.group or "").nodes),
    ):
        shutil.copyfile(os.path.join(brought, name), target)
    # The plan and the code: on a volume an earlier group's may be there.
    for name in os.listdir(came):
        target = os.path.join(run_dir.path, name)
        if os.path.isdir(target):
            shutil.rmtree(os.path.join(came, name))
        else:
            os.replace(os.path.join(came, name), target)
    shutil.rmtree(came, ignore_errors=True)
    with open(os.path.join(brought, KEY_FILE)) as file:
        atomic.replace_file(run_dir.secret, file.read().encode(), mode=0o600)
    make_mark(run_dir.path)
    os.makedirs(order.folder, exist_ok=True)
    atomic.write_json(order.stamps, {"head": head or mark_of(run_dir.path)})
