"""The run directories of a sweep's members at the client, made when the first of their record comes from the pods."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator

from torchmuster.engines.ssh_files import own_paths
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model.states import RunState
from torchmuster.net.remote_messages import FilePiece, FrameError
from torchmuster.node.pod.order import PodOrder
from torchmuster.node.remote.files import write_piece
from torchmuster.owner.sweep.members import member_dir, prepare_member
from torchmuster.owner.views.record import read_result
from torchmuster.owner.views.sweep_view import read_sweep
from torchmuster.spec.sweep_plan import SweepPlan, member_of_id

_GROW = frozenset({RunDir.events, RunDir.training})
_BELOW = ("logs/", "output/")
# Another attempt follows those of other states, maybe on another disk.
_OVER = (RunState.SUCCEEDED, RunState.STOPPED, RunState.FAILED)
_LIMIT_BYTES = 64 << 30


def is_of_member(path: str) -> bool:
    """Say whether a file that pods send belongs to a member of a sweep."""
    return path.startswith(f"{RunDir.members}/")


class MemberCopies:
    """Writes what pods send of members: their records, and nothing else.

    Args:
        run_dir: Of the sweep here.
        order: Of its pods.
    """

    def __init__(self, run_dir: RunDir, order: PodOrder) -> None:
        self._run_dir, self._order = run_dir, order
        self._plan: SweepPlan | None = read_sweep(run_dir)
        self._made: set[int] = set()

    def whole(self) -> Iterator[str]:
        """Return the files of members that are complete here: they need not come again."""
        for number in range(len(self._plan.members) if self._plan is not None else 0):
            folder = self._folder(number)
            result = read_result(folder) if os.path.isdir(folder.path) else None
            if result is not None and result.state in _OVER:
                yield folder.result

    def take(self, piece: FilePiece) -> None:
        """Write one piece.

        Raises:
            FrameError: It may not be written here.
        """
        _, name, file = piece.path.split("/", 2)
        named = member_of_id(name)
        grows = file in _GROW or file.startswith(_BELOW)
        if self._plan is None or named is None or not (grows or file == RunDir.result):
            raise FrameError(f"the first pod sends {piece.path}")
        number = named[1]
        if number >= len(self._plan.members) or self._plan.member_id(number) != name:
            raise FrameError(f"the first pod sends {piece.path}")
        if piece.offset + len(piece.data) > _LIMIT_BYTES:
            raise FrameError(f"the first pod sends too much of {piece.path}")
        folder = self._made_folder(number)
        if file == RunDir.result:
            self._take_result(folder, piece)
            return
        if piece.offset == 0:  # from the beginning: what is here may be of another pod
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder.path, file))
        write_piece(folder.path, file, piece.offset, piece.data)

    def _folder(self, number: int) -> RunDir:
        if self._plan is None:
            raise FrameError("the plan of the sweep can't be read")
        return member_dir(self._run_dir, self._plan, number)

    def _made_folder(self, number: int) -> RunDir:
        """Return the folder of a member, made now where it is not there."""
        folder = self._folder(number)
        if number not in self._made and self._plan is not None:
            self._made.add(number)
            if os.path.isdir(folder.path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(folder.result)  # of an attempt before
                shutil.rmtree(os.path.join(folder.path, "logs"), ignore_errors=True)
            with contextlib.suppress(MusterError):
                prepare_member(self._run_dir, self._plan, number)
        return folder

    def _take_result(self, folder: RunDir, piece: FilePiece) -> None:
        theirs = os.path.join(self._order.run_dir.members, os.path.basename(folder.path))
        try:
            plain = json.loads(piece.data)
        except ValueError as error:
            raise FrameError(f"{piece.path} is no JSON") from error
        own = own_paths(plain, theirs, folder.path, None)
        atomic.write_json(folder.result, own)
