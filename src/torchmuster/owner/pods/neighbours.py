"""The record of a run on the disks of other pods: without a volume it would go with the first pod.

The owner sends it to two other pods whenever it has grown. The owner of a first pod that has been made again finds it there, so
attempts, restarts and the client's copy go on. Snapshots are larger: they need a volume.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.node.pod.call import call_argv
from torchmuster.node.pod.order import PodOrder
from torchmuster.node.remote.files import MARK_FILE, mark_of

_COPIES = 2
_EVERY_S = 2.0
_ASK_S = 10.0
_MAX_BYTES = 8 << 20
_FOLDER = '"$MUSTER_HOME/record-of-the-first-pod"'  # in the shell of another pod
_EVENTS, _TRAINING = "events.jsonl", "training.jsonl"
_FILES = (_EVENTS, _TRAINING, MARK_FILE)


@dataclass(slots=True)
class RecordNeighbours:
    """Keeps copies of the record on other pods."""

    order: PodOrder
    key: str
    _sent: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin, in a thread."""
        threading.Thread(target=self._work, name="neighbours", daemon=True).start()

    def stop(self) -> None:
        """End it."""
        self._stopping.set()

    def _work(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            for index in range(1, min(self.order.num_pods, 1 + _COPIES)):
                for name in _FILES:
                    with contextlib.suppress(MusterError, OSError):
                        self._send(index, name)

    def _send(self, index: int, name: str) -> None:
        path = os.path.join(self.order.run_dir.path, name)
        status = os.stat(path)
        now = (status.st_size, status.st_mtime_ns)
        if self._sent.get((index, name)) == now or status.st_size > _MAX_BYTES:
            return
        with open(path, "rb") as file:
            data = file.read()
        command = f"mkdir -p {_FOLDER} && cat >{_FOLDER}/{name}.part && mv {_FOLDER}/{name}.part {_FOLDER}/{name}"
        if self._ask(index, command, data).status == 0:
            self._sent[index, name] = now

    def _ask(self, index: int, command: str, data: bytes = b"") -> proc.Answered:
        words = call_argv(self.key, self.order.port, domain=self.order.job)
        return proc.ask([*words, self.order.host(index), command], data, _ASK_S)

    def find(self, say: Callable[[str], None]) -> None:
        """Take the record over from other pods, where this one has none: the longest that they have."""
        run_dir = self.order.run_dir
        if os.path.exists(run_dir.events) or mark_of(run_dir.path):
            return
        best: tuple[int, bytes] | None = None
        for index in range(1, min(self.order.num_pods, 1 + _COPIES)):
            with contextlib.suppress(MusterError):
                events = self._fetch(index, _EVENTS)
                if events and (best is None or len(events) > len(best[1])):
                    best = index, events
        if best is None:
            return
        index, events = best
        atomic.replace_file(run_dir.events, events)
        for name in (_TRAINING, MARK_FILE):
            with contextlib.suppress(MusterError):
                if data := self._fetch(index, name):
                    atomic.replace_file(os.path.join(run_dir.path, name), data, mode=0o600)
        say(
            f"this pod takes the place of a lost one: the record goes on from {self.order.host(index)}"
        )

    def _fetch(self, index: int, name: str) -> bytes:
        said = self._ask(index, f"cat {_FOLDER}/{name} 2>/dev/null")
        return said.stdout if said.status == 0 else b""
