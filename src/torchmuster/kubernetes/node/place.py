"""Puts what a group needs into a pod's run directory: plan, code, and the outputs its tasks read.

The archive is in a Secret or comes on standard input. With `check` nothing is read, and the exit
code is 3 if the archive is still needed. If a replaced first pod found no record, it starts from
scratch: what tasks left here for its predecessor is removed.
"""

import lzma
import os
import shutil
from dataclasses import dataclass

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.codec import from_arguments
from torchmuster.kubernetes.node.order import (
    CODE_FILE,
    KEY_FILE,
    MOVED_FILE,
    NODES_FILE,
    WORKFLOW_FILE,
    PodOrder,
    read_order,
)
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.net.relay import SendsMessages
from torchmuster.launcher.node.remote.files import make_mark, mark_of, send_outputs
from torchmuster.workflow.plan import GroupNodes

# The outputs of a group's tasks, on their way to the first pod, and from there to the client.


TASKS_FOLDER = "tasks"


class TaskOutputs:
    """The outputs of a group's tasks in this pod."""

    def __init__(self, order: PodOrder) -> None:
        self._order = order

    def send(self, session: SendsMessages) -> list[str]:
        """Send the outputs, each completely or not at all; return descriptions of the rest.

        With a volume nothing has to travel.
        """
        if self._order.has_volume or self._order.group is None:
            return []
        run_dir = self._order.run_dir
        come: list[str] = []
        stay: list[str] = []
        room = code_copy.MAX_OUTPUT_BYTES
        for task in _tasks_with_output(self._order):
            names, size = _files_of(run_dir, task)
            if size > room:
                stay.append(f"the output of {task}")
                continue
            room -= size
            come += names
        send_outputs(session, run_dir.path, come)
        return stay


def send_outputs_of_others(session: SendsMessages, order: PodOrder) -> None:
    """Send what the first pod has fetched from the others: new and changed files of their code."""
    top = os.path.join(order.run_dir.path, "output")
    for host in sorted(os.listdir(top)) if os.path.isdir(top) else ():
        root = os.path.join(top, host)
        names = [
            os.path.relpath(os.path.join(folder, name), root)
            for folder, _, files in os.walk(root)
            for name in sorted(files)
        ]
        send_outputs(session, root, names, host)


def _tasks_with_output(order: PodOrder) -> list[str]:
    """Return the tasks of the group with outputs in this pod, made or gathered."""
    run_dir = order.run_dir
    noted = atomic.read_json(run_dir.group(order.group or "").nodes)
    names = codec.from_plain(GroupNodes, noted).tasks if noted is not None else {}
    return [name for name in names if os.path.isdir(run_dir.task_output(name))]


def take_outputs(run_dir: RunDir, came: str) -> None:
    """Move outputs that were unpacked into a separate folder to where tasks look for them."""
    folder = os.path.join(came, TASKS_FOLDER)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        source, target = os.path.join(folder, name, "output"), run_dir.task_output(name)
        if os.path.isdir(source) and not os.path.lexists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.rename(source, target)


def output_names(run_dir: RunDir, task: str) -> list[str]:
    """Return the files of a task's output, as paths relative to the run directory."""
    return _files_of(run_dir, task)[0]


def _files_of(run_dir: RunDir, task: str) -> tuple[list[str], int]:
    names, size = [], 0
    root = run_dir.task_output(task)
    for folder, _, files in os.walk(root):
        for name in sorted(files):
            path = os.path.join(folder, name)
            names.append(os.path.relpath(path, run_dir.path))
            size += os.lstat(path).st_size
    return names, size


LACKS_CODE = 3
_LIMIT_BYTES = 2 * (code_copy.MAX_CODE_BYTES + code_copy.MAX_OUTPUT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceWords:
    """The command line of `pod-place`: order file, the head's mark, and whether to check only."""

    order: str
    head: str
    check: bool = False


def main(arguments: list[str]) -> int:
    """Put the archive and the plan into place."""
    words = from_arguments(PlaceWords, arguments)
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
    """Say whether what the group needs is in this pod."""
    return os.path.exists(order.stamps)


def placed_by(order: PodOrder) -> str:
    """Return the mark of the head for which the files were placed; empty if they weren't."""
    noted = atomic.read_json(order.stamps)
    return str(noted.get("head")) if isinstance(noted, dict) else ""


def place(order: PodOrder, brought: str, head: str | None = None) -> None:
    """Unpack the archive; `head` is the mark of the head's folder, None for this pod's own.

    Raises:
        OSError: There is no room.
        ValueError: The archive is damaged.
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
    with lzma.open(os.path.join(brought, MOVED_FILE)) as packed:
        atomic.replace_file(os.path.join(came, WORKFLOW_FILE), packed.read(_LIMIT_BYTES))
    nodes = run_dir.group(order.group or "").nodes
    shutil.copyfile(os.path.join(brought, NODES_FILE), nodes)
    # The plan and the code; on a volume an earlier group may have put them there.
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
