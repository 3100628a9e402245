"""The messages between the owner of a sweep in the first pod and the slots in all pods; they are framed as those of an ssh session.

A slot first says `Placed`, and gets the code where it lacks it; `SetUpDone` opens it. `RemotePing` goes both ways: who hears nothing
for a while takes the other side for lost.
"""

from dataclasses import field

from torchmuster.model.failure import WorkerEnd
from torchmuster.model.states import RunState
from torchmuster.net.remote_messages import RemoteMessage


class StartMember(RemoteMessage):
    """From the owner: start this member; one runs at a time.

    Attributes:
        sizes: Of the files of its record that earlier attempts have left and that grow on: their `FilePiece`s follow.
    """

    member: int
    attempt: int
    sizes: dict[str, int] = field(default_factory=dict)


class SignalMember(RemoteMessage):
    """From the owner: send a signal to a member, if it still runs."""

    member: int
    signum: int


class MemberEnded(RemoteMessage):
    """From the slot: a member has ended, and all of its record has been sent before this.

    Attributes:
        worker: How its only process ended; None of a member with a head, whose result has been sent.
        is_lost: It ended by no fault of its own.
    """

    member: int
    state: RunState
    worker: WorkerEnd | None = None
    is_lost: bool = False


class SlotLeaves(RemoteMessage):
    """From the slot: its pod was told to end: no other member can start here, the one that runs gets its grace."""
