"""What the tasks of a group have made, on its way from their pods: to the first one, and from there to the client."""

import os

from torchmuster.files import atomic, code_copy
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.workflow import GroupNodes
from torchmuster.net.relay import SendsMessages
from torchmuster.node.pod.order import PodOrder
from torchmuster.node.remote.files import send_outputs

TASKS_FOLDER = "tasks"


class TaskOutputs:
    """The outputs of a group's tasks in this pod."""

    def __init__(self, order: PodOrder) -> None:
        self._order = order

    def send(self, session: SendsMessages) -> list[str]:
        """Send the outputs, each whole or not at all; return the tasks whose outputs stay here.

        On a volume nothing has to travel.
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
    """Send what the first pod has fetched of the others: new and changed files of their code folders."""
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
    """Return the tasks of the group whose outputs are here: made here, or gathered."""
    run_dir = order.run_dir
    noted = atomic.read_json(run_dir.group(order.group or "").nodes)
    names = codec.from_plain(GroupNodes, noted).tasks if noted is not None else {}
    return [name for name in names if os.path.isdir(run_dir.task_output(name))]


def take_outputs(run_dir: RunDir, came: str) -> None:
    """Put outputs that were unpacked in a folder of their own where tasks look for them."""
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
    """Return the files of a task's output, by their paths in the run directory."""
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
