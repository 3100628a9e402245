"""What a group's tasks write in other pods, gathered in the first one: logs while they grow, outputs at the end."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmuster.engines.ssh_files import FilesBack
from torchmuster.errors import MusterError
from torchmuster.net import remote_messages as messages
from torchmuster.net.secret import read_secret
from torchmuster.node.pod.lines import PodLines
from torchmuster.node.pod.order import ORDER_VARIABLE, PROGRAMS_VARIABLE, PodOrder
from torchmuster.node.pod.outputs import take_outputs
from torchmuster.owner.pods.pull import RecordPull

_AGAIN_S = 2.0
_FINISH_S = 120.0


@dataclass(slots=True)
class _Known:
    """Which disk a pod's record is on, and how much of each file has come: no more is sent again."""

    mark: str = ""
    sizes: dict[str, int] = field(default_factory=dict)


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
    _lines: PodLines = field(init=False)
    _threads: list[threading.Thread] = field(default_factory=list)
    _pulls: dict[int, RecordPull] = field(default_factory=dict)
    _known: dict[int, "_Known"] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Make nothing yet."""
        self._lines = PodLines(
            secret=read_secret(self.key), port=self.order.port, domain="", wait_s=0.0
        )

    def start(self) -> None:
        """Begin, in a thread for each pod."""
        if self.order.has_volume:
            return
        for index in self.pods:
            thread = threading.Thread(target=self._follow, args=(index,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self) -> None:
        """Take what is still missing, with the outputs; the pods that don't answer any more are named."""
        self._stopping.set()
        for pull in list(self._pulls.values()):
            pull.stop()
        for thread in self._threads:
            thread.join(_FINISH_S)

    def _follow(self, index: int) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(MusterError, OSError, messages.FrameError):
                self._pull(index, "")
            self._stopping.wait(_AGAIN_S)
        try:
            self._pull(index, " --once --outputs")
        except (MusterError, OSError, messages.FrameError, ValueError) as error:
            self.say(f"{self.order.host(index)}: what its tasks made did not come: {error}")

    def _pull(self, index: int, how: str) -> None:
        run_dir = self.order.run_dir
        files = FilesBack(run_dir)
        host = f"pod-{index}"
        command = f'exec ${PROGRAMS_VARIABLE} pod-record --order "${ORDER_VARIABLE}"{how}'
        known = self._known.setdefault(index, _Known())
        end: messages.RecordEnd | None = None

        def take(message: messages.RemoteMessage) -> bool:
            nonlocal end, known
            match message:
                case messages.RecordOf(mark=mark) if mark != known.mark:
                    self._known[index] = known = _Known(mark=mark)
                case messages.FilePiece(path=path, offset=offset, data=data):
                    files.take(message, host)
                    known.sizes[path] = offset + len(data)
                case messages.RecordEnd():
                    end = message
                    return False
            return True

        pull = RecordPull([self.order.address(index), command], self._lines.start)
        self._pulls[index] = pull
        pull.run({"mark": known.mark, "sizes": dict(known.sizes)}, take)
        if end is None and how:
            raise MusterError("the connection ended")
        if end is not None and how:
            came = os.path.join(self.order.folder, f"came-{index}")
            files.unpack(host, came)
            take_outputs(run_dir, came)
            if end.num_stay:
                self.say(
                    f"{self.order.host(index)}: too large to leave its pod: {', '.join(end.stay)}"
                )
