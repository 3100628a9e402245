"""The owner of a sweep in the first of its pods: its queue fills the slots, which are all pods of one Job.

    conduct-sweep-pods --key FILE --order FILE

It needs no client, and its record is what the client copies. A first pod that is made again goes on with what has not ended.
"""

import asyncio
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field

from torchmuster.files import atomic
from torchmuster.files.terminal import TerminalVoice
from torchmuster.model import codec
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Result
from torchmuster.net.secret import read_secret
from torchmuster.node.pod import order as orders
from torchmuster.node.pod.sweep_record import note_job, noted_job
from torchmuster.node.remote.files import CodeOutputs
from torchmuster.owner.pods.archive import wait_for_archive
from torchmuster.owner.pods.conduct import PodOwner, conduct
from torchmuster.owner.pods.neighbours import RecordNeighbours
from torchmuster.owner.pods.sweep.slot import plan_here
from torchmuster.owner.pods.sweep.slots import PodSlots
from torchmuster.owner.sweep.owner import NOT_AGAIN, SweepOwner
from torchmuster.owner.sweep.slots import Slots
from torchmuster.owner.sweep.stop_rules import load_rule
from torchmuster.spec.sweep_plan import SweepPlan

_CODE_LIMIT_S = 600.0


def main(arguments: list[str]) -> int:
    """Own the sweep of these pods to its end; return the pod's exit code."""

    def own(order: orders.PodOrder, key: str, path: str, voice: TerminalVoice) -> int:
        return _SweepPodOwner(order, key, os.path.dirname(path), voice).run()

    return conduct("conduct-sweep-pods", arguments, own)


@dataclass(slots=True)
class _SweepPodOwner(PodOwner):
    _goes_on: bool = field(default=False)

    def run(self) -> int:
        self._goes_on = self._take_over()
        return PodOwner.run(self)  # `super` knows no class with slots

    def _take_over(self) -> bool:
        """Say whether an earlier first pod of this very Job has left a record here; that of an earlier Job has ended."""
        if noted_job(self.run_dir) == self.order.job:
            return True
        for left in (self.order.ended, self.run_dir.result, self.run_dir.cancelled):
            with suppress(FileNotFoundError):
                os.unlink(left)
        os.makedirs(self.run_dir.path, mode=0o700, exist_ok=True)
        note_job(self.run_dir, self.order.job)
        return False

    def own(self) -> Result:
        neighbours = RecordNeighbours(self.order, self.key)
        plan = self._place_sweep(neighbours)
        rule = load_rule(plan.stop, plan.metric) if plan.stop and plan.metric else None
        # A member that has failed runs again for a user who wants it, not for a pod that is made again.
        done = (*NOT_AGAIN, RunState.FAILED) if self._goes_on else NOT_AGAIN
        told = _Told(self.voice)
        owner = SweepOwner(plan, self.run_dir, told, rule, self._slots_of, done)
        told.owner = owner
        neighbours.start()
        try:
            result = asyncio.run(owner.run())
        finally:
            self.is_told_to_stop |= owner.was_told_to_stop
            neighbours.stop(is_taken_away=self.is_told_to_stop)
        return result

    def _place_sweep(self, neighbours: RecordNeighbours) -> SweepPlan:
        order, run_dir = self.order, self.run_dir
        self.make_run_dir(neighbours)
        os.makedirs(run_dir.members, mode=0o700, exist_ok=True)
        self._goes_on |= os.path.exists(run_dir.events) and not order.has_volume
        settled = os.path.join(self.brought, orders.SETTLED_FILE)
        if os.path.exists(settled) and not os.path.exists(run_dir.events):
            shutil.copyfile(settled, run_dir.events)
        code = CodeOutputs(run_dir)
        if not code.is_there:
            wait_for_archive(order, self.brought, _CODE_LIMIT_S, self.voice.say)
            with suppress(FileExistsError):
                os.link(order.archive, self._archive)  # other pods get it from here
            code.unpack()
        plain = atomic.read_json(os.path.join(self.brought, orders.SWEEP_FILE))
        plan = plan_here(codec.from_plain(SweepPlan, plain), order, code.root)
        atomic.write_json(run_dir.sweep, codec.to_plain(plan))
        os.chdir(plan.run.program.cwd)  # where a rule of the user's own is
        return plan

    @property
    def _archive(self) -> str:
        return f"{self.order.archive}.all"

    def _slots_of(self, owner: SweepOwner) -> Slots:
        return PodSlots(
            self.order,
            read_secret(self.key),
            self._archive,
            owner.take_end,
            owner.take_slot,
            owner.display.say,
            lambda name, fields: owner.event(name, **fields),
            is_forked=owner.plan.is_forked,
        )


class _Told:
    """Says sentences in the pod's log and in the record, which a client shows."""

    def __init__(self, voice: TerminalVoice) -> None:
        self._voice = voice
        self.owner: SweepOwner | None = None

    def say(self, sentence: str) -> None:
        self._voice.say(sentence)
        if self.owner is not None:
            self.owner.notice(sentence)
