"""Copies of a run's record on the disks of other pods, in case a first pod without volume is lost.

Two other pods keep a copy. The owner in a replacement of the first pod restores it, so attempts,
restarts and the client's copy continue. Snapshots are too large for this: they need a volume.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster.core.files import atomic
from torchmuster.core.net.address import read_secret
from torchmuster.errors import MusterError
from torchmuster.kubernetes.node.call import PodConnections
from torchmuster.kubernetes.node.keep import kept_folder, kept_scope
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.pods.pull import BROKEN, Pull, Push, into, program
from torchmuster.launcher.engines.ssh_host import Starts
from torchmuster.launcher.net.replica import Copy
from torchmuster.launcher.node.remote.files import mark_of

_COPIES = 2
_AGAIN_S, _ASK_S = 2.0, 10.0
_LAST_S = 3.0  # of a pod's grace when it is taken away


@dataclass(slots=True)
class RecordReplicas:
    """Keeps copies of the record in other pods.

    Attributes:
        starts: Opens a session with a pod.
        say: Tells the user.
    """

    order: PodOrder
    key: str
    starts: Starts | None = None
    say: Callable[[str], None] = lambda _: None
    _said: set[str] = field(default_factory=set)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def _others(self) -> range:
        """Return the pods that keep a copy: none with a volume, which outlives the pods."""
        return range(1, 0 if self.order.has_volume else min(self.order.num_pods, 1 + _COPIES))

    def _start(self) -> Starts:
        if self.starts is None:
            secret = read_secret(self.key)
            self.starts = PodConnections(
                secret=secret, port=self.order.port, domain="", wait_s=0.0
            ).start
        return self.starts

    def start(self) -> None:
        """Start copying, in one thread for each pod."""
        for index in self._others:
            thread = threading.Thread(
                target=self._push, args=(index,), name="neighbours", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def stop(self, *, is_taken_away: bool = False) -> None:
        """Stop copying; if this pod is taken away, first let the last lines arrive."""
        self._stopping.set()
        for thread in self._threads if is_taken_away else ():
            thread.join(_LAST_S)

    def _push(self, index: int) -> None:
        root = self.order.run_dir.path
        argv = [self.order.address(index), program("pod-keep")]
        while not self._stopping.is_set():
            try:
                scope, mark = kept_scope(self.order), mark_of(root)
                Push(argv, self._start()).run(root, scope, mark, self._stopping)
            except BROKEN as error:
                self._note(index, error)
            self._stopping.wait(_AGAIN_S)

    def _note(self, index: int, error: Exception) -> None:
        """Report once why a pod can't keep a copy, e.g. a full disk; ignore broken connections."""
        why = error.why if isinstance(error, MusterError) else None
        if why is not None and why not in self._said:
            self._said.add(why)
            self.say(f"{self.order.host(index)} can't keep a copy of the record: {why}")

    def find(self, say: Callable[[str], None]) -> None:
        """Restore the record from the pod that has the most events, if there is none here."""
        run_dir = self.order.run_dir
        if not self._others or os.path.exists(self._events(run_dir.path)):
            return
        found = {index: self._fetch(index) for index in self._others}
        index = max(found, key=lambda one: len(_lines_of(self._events(found[one]))))
        if not _lines_of(self._events(found[index])):
            return
        for path in kept_scope(self.order).files(found[index]):
            target = os.path.join(run_dir.path, path)
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            atomic.replace_file(target, _lines_of(os.path.join(found[index], path)), mode=0o600)
        say(
            f"this pod takes the place of a lost one: the record goes on from {self.order.host(index)}"
        )

    def _events(self, root: str) -> str:
        """Return the path of the events in a copy of the run directory."""
        group = self.order.group
        return os.path.join(root, *(["groups", group] if group is not None else []), "events.jsonl")

    def _fetch(self, index: int) -> str:
        """Fetch the copy that a pod keeps; return its folder."""
        folder = f"{kept_folder(self.order)}.of-{index}"
        argv = [self.order.address(index), program("pod-record --once --kept")]
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for _ in range(2):  # the node may be loaded, and the record must not be lost
            copy = Copy(folder, kept_scope(self.order), mode=0o600)
            with contextlib.suppress(*BROKEN):
                if Pull(argv, self._start()).run(copy.has(), into(copy), limit_s=_ASK_S):
                    break
        return folder


def _lines_of(path: str) -> bytes:
    """Return the complete lines of a file, without a partial last one."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        data = file.read()
        return data[: data.rfind(b"\n") + 1]
    return b""
