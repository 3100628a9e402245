"""The record of a run on the disks of other pods: without a volume it would go with the first pod.

The owner sends it to two other pods whenever it has grown. The owner of a first pod that has been made again finds it there, so
attempts, restarts and the client's copy go on. Snapshots are larger: they need a volume.
"""

import contextlib
import os
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.net.secret import read_secret
from torchmuster.node.pod.lines import ask_pod
from torchmuster.node.pod.order import PodOrder
from torchmuster.node.remote.files import MARK_FILE, mark_of

_COPIES = 2
_EVERY_S = 2.0
_ASK_S = 10.0
_LAST_ASK_S = 3.0  # of the grace of a pod that is taken away
_MAX_BYTES = 8 << 20
_EVENTS, _TRAINING = "events.jsonl", "training.jsonl"


@dataclass(slots=True)
class RecordNeighbours:
    """Keeps copies of the record on other pods.

    Attributes:
        ask: Runs a command in a pod: its number, the command, its input, the limit.
    """

    order: PodOrder
    key: str
    ask: Callable[[int, str, bytes, float], proc.Answered] | None = None
    _sent: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin, in a thread; on a volume the record outlives the pods anyhow."""
        if self.order.has_volume:
            return
        threading.Thread(target=self._work, name="neighbours", daemon=True).start()

    def stop(self, *, is_taken_away: bool = False) -> None:
        """End it; who takes the place of a pod that is taken away finds its last words."""
        was_started = not self.order.has_volume and not self._stopping.is_set()
        self._stopping.set()
        if is_taken_away and was_started:
            self._send_all((_EVENTS,), _LAST_ASK_S)

    def _work(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self._send_all(tuple(self._paths), _ASK_S)

    def _send_all(self, names: tuple[str, ...], limit_s: float) -> None:
        for index in range(1, min(self.order.num_pods, 1 + _COPIES)):
            for name in names:
                with contextlib.suppress(MusterError, OSError):
                    self._send(index, name, limit_s)

    @property
    def _paths(self) -> dict[str, str]:
        """Return the files that are copied, by their names on other pods."""
        run_dir, group = self.order.run_dir, self.order.group
        mark = {MARK_FILE: os.path.join(run_dir.path, MARK_FILE)}
        if group is not None:
            return {_EVENTS: run_dir.group(group).events, **mark}
        return {_EVENTS: run_dir.events, _TRAINING: run_dir.training, **mark}

    @property
    def _folder(self) -> str:
        """Return the folder of the copies, for the shell of another pod: its home may have seen other runs."""
        words = (self.order.run_id, self.order.group)
        name = ".".join(word for word in words if word is not None)
        return f'"$MUSTER_HOME/records/"{shlex.quote(name)}'

    def _send(self, index: int, name: str, limit_s: float) -> None:
        path = self._paths[name]
        status = os.stat(path)
        now = (status.st_size, status.st_mtime_ns)
        if self._sent.get((index, name)) == now or status.st_size > _MAX_BYTES:
            return
        with open(path, "rb") as file:
            data = file.read()
        path = f"{self._folder}/{name}"
        command = f"mkdir -p {self._folder} && cat >{path}.part && mv {path}.part {path}"
        if self._ask(index, command, data, limit_s).status == 0:
            self._sent[index, name] = now

    def _ask(
        self, index: int, command: str, data: bytes = b"", limit_s: float = _ASK_S
    ) -> proc.Answered:
        if self.ask is not None:
            return self.ask(index, command, data, limit_s)
        host, secret = self.order.address(index), read_secret(self.key)
        return ask_pod(host, self.order.port, secret, command, limit_s, data)

    def find(self, say: Callable[[str], None]) -> None:
        """Take the record over from other pods, where this one has none: the longest that they have."""
        paths = self._paths
        if self.order.has_volume:
            return
        if os.path.exists(paths[_EVENTS]) or mark_of(self.order.run_dir.path):
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
        os.makedirs(os.path.dirname(paths[_EVENTS]), mode=0o700, exist_ok=True)
        atomic.replace_file(paths[_EVENTS], events)
        for name in [name for name in paths if name != _EVENTS]:
            with contextlib.suppress(MusterError):
                if data := self._fetch(index, name):
                    atomic.replace_file(paths[name], data, mode=0o600)
        say(
            f"this pod takes the place of a lost one: the record goes on from {self.order.host(index)}"
        )

    def _fetch(self, index: int, name: str) -> bytes:
        command = f"cat {self._folder}/{name} 2>/dev/null"
        said = self._ask(index, command)
        if said.status is None:
            # It began to answer: a loaded node, and a record that must not be lost.
            said = self._ask(index, command)
        return said.stdout if said.status == 0 else b""
