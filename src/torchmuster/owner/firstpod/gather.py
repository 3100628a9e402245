"""What a group's tasks write in other pods, gathered in the first one: logs while they grow, outputs at the end."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmuster.errors import MusterError
from torchmuster.net import remote_messages as messages
from torchmuster.net.replica import Copy
from torchmuster.net.secret import read_secret
from torchmuster.node.pod.lines import PodLines
from torchmuster.node.pod.order import PodOrder
from torchmuster.node.pod.outputs import take_outputs
from torchmuster.node.pod.record import scope_of
from torchmuster.node.remote.files import CameBack
from torchmuster.owner.pods.pull import BROKEN, Pull, into, program

_AGAIN_S = 2.0
_FINISH_S = 120.0


@dataclass(slots=True)
class GroupGather:
    """Follows the records of other pods of a group; on a volume there is nothing to do.

    Attributes:
        pods: Those in which an agent of a task is started.
    """

    order: PodOrder
    key: str
    pods: Sequence[int]
    say: Callable[[str], None]
    _threads: list[threading.Thread] = field(default_factory=list)
    _pulls: dict[int, Pull] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin, in a thread for each pod."""
        if self.order.has_volume:
            return
        lines = PodLines(secret=read_secret(self.key), port=self.order.port, domain="", wait_s=0.0)
        for index in self.pods:
            thread = threading.Thread(target=self._follow, args=(index, lines), daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self) -> None:
        """Take what is still missing, with the outputs; the pods that don't answer any more are named."""
        self._stopping.set()
        for pull in list(self._pulls.values()):
            pull.stop()
        for thread in self._threads:
            thread.join(_FINISH_S)

    def _follow(self, index: int, lines: PodLines) -> None:
        name, run_dir = self.order.host(index), self.order.run_dir
        copy = Copy(run_dir.path, scope_of(self.order))
        while not self._stopping.is_set():
            with contextlib.suppress(*BROKEN):
                self._pull(index, lines, "pod-record", copy)
            self._stopping.wait(_AGAIN_S)
        try:
            outputs = CameBack(run_dir)
            end = self._pull(index, lines, "pod-record --once --outputs", copy, outputs)
            if end is None:
                raise MusterError("the connection ended")
            came = os.path.join(self.order.folder, f"came-{index}")
            outputs.unpack(name, came)
            take_outputs(run_dir, came)
        except (*BROKEN, ValueError) as error:
            self.say(f"{name}: what its tasks made did not come: {error}")
            return
        if end.num_stay:
            self.say(f"{name}: too large to leave its pod: {', '.join(end.stay)}")
        if end.unread:
            self.say(f"{name}: can't be read in its pod: {', '.join(end.unread)}")

    def _pull(
        self, index: int, lines: PodLines, words: str, copy: Copy, outputs: CameBack | None = None
    ) -> messages.CopyEnd | None:
        name, take = self.order.host(index), into(copy)

        def hear(message: messages.RemoteMessage) -> bool:
            if isinstance(message, messages.FilePiece) and message.path == messages.OUTPUT_FILE:
                if outputs is not None:
                    outputs.take(message, name)
                return True
            return take(message)

        self._pulls[index] = Pull([self.order.address(index), program(words)], lines.start)
        return self._pulls[index].run(copy.has(), hear)
