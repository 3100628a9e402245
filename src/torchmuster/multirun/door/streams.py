"""Remote ends for runs in a session: the door of this node forks them, the session's own channel carries their streams.

So whoever may follow the session may start a run in it, and no other way to the node is needed.
"""

from collections.abc import Mapping

from torchmuster.core.files.layout import RunDir
from torchmuster.core.net import messages
from torchmuster.core.proc import HasStatus
from torchmuster.launcher.node.exec import Execs, ExecTarget, Send
from torchmuster.multirun.door.call import DoorAgent, call_door, send_order
from torchmuster.multirun.door.messages import ForkRemote

_LEAVE_S = 15.0  # a remote end takes up to 10 s to end its agents


class _Door:
    """What a remote end is started beside: nothing, the door forks it."""

    pid = 0
    worker_ticks: int | None = None
    environment: Mapping[str, str] | None = None

    def has_begun(self) -> bool:
        """Say that it can be called."""
        return True

    def poll(self) -> int | None:
        """Return that it has not ended: a call would say so."""
        return None


class RemoteEnds:
    """The remote ends that the door of this node has forked.

    Args:
        run_dir: Of the session.
        place: Of this node in it.
        host: Its name, for messages.
        send: Takes messages for the head.
    """

    def __init__(self, run_dir: RunDir, place: int, host: str, send: Send) -> None:
        self._run_dir, self._place = run_dir, place
        self._execs = Execs(host, send, self._launch, _LEAVE_S)

    def take(self, message: messages.FromExecClient) -> None:
        """Carry out a message of a client."""
        self._execs.take(message, _Door())

    def end_all(self, why: str) -> None:
        """End all of them; their agents end with them."""
        self._execs.end_all(why)

    def _launch(
        self, order: messages.ExecStart, target: ExecTarget, streams: tuple[int, int, int]
    ) -> HasStatus:
        del order, target
        line = call_door(self._run_dir, self._place)
        send_order(line, ForkRemote(), streams)
        return DoorAgent(line, self._run_dir.path)
