"""Early stop of the worst members of job arrays, by the command that follows the sweep."""

import contextlib
from dataclasses import dataclass, field

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.codec import event_line, utc_now
from torchmuster.core.model.states import RunState
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.base import ArrayDialect
from torchmuster.launcher.jobs.jobs import cancel_job
from torchmuster.multirun.sweep.arrays import (
    SweepArrays,
    element_of,
    load_arrays,
    object_members,
)
from torchmuster.multirun.sweep.members import member_dir
from torchmuster.multirun.sweep.metric import MetricReader
from torchmuster.multirun.sweep.plan import SweepPlan
from torchmuster.multirun.sweep.stop_rules import StopRule, load_rule
from torchmuster.multirun.views.array_view import stopped_members
from torchmuster.multirun.views.sweep_view import SweepView


@dataclass(slots=True)
class ArrayStops:
    """Feeds a rule with the members' metric values, and cancels the elements that it rejects.

    Attributes:
        stopped: Members that this command or an earlier one has stopped.
    """

    plan: SweepPlan
    run_dir: RunDir
    rule: StopRule
    stopped: set[int] = field(default_factory=set)
    _readers: dict[int, MetricReader] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)

    def look(self, view: SweepView) -> None:
        """Read new metric values and stop members; may wait for a disk and for the scheduler."""
        loaded = load_arrays(self.run_dir)
        for member in view.members:
            if member.number in self._ended or member.attempt is None or self.plan.metric is None:
                continue
            reader = self._readers.get(member.number)
            if reader is None:
                folder = member_dir(self.run_dir, self.plan, member.number)
                reader = MetricReader(folder, self.plan.metric.name)
                self._readers[member.number] = reader
            wants = [self.rule.report(member.number, p.step, p.value) for p in reader.read()]
            if member.state.is_final:
                self._ended.add(member.number)
                self.rule.ended(member.number, member.state is RunState.SUCCEEDED)
            elif any(wants) and member.number not in self.stopped and loaded is not None:
                self._stop(member.number, reader, loaded)

    def _stop(
        self, number: int, reader: MetricReader, loaded: tuple[ArrayDialect, SweepArrays]
    ) -> None:
        if element_of(loaded, number) is None:
            return
        step = reader.newest.step if reader.newest is not None else None
        line = event_line(
            utc_now(), "member_stopped", {"member": number, "step": step, "rule": self.plan.stop}
        )
        # Before the cancel: the member may end at once, and the reason is recorded nowhere else.
        with open(self.run_dir.events, "ab") as events:
            events.write(line.encode())
        self.stopped.add(number)
        with contextlib.suppress(MusterError):  # it may have ended
            cancel_member(self.run_dir, loaded, number)


def stops_of(plan: SweepPlan, run_dir: RunDir) -> ArrayStops | None:
    """Return what stops members of a sweep early; None for a sweep without a rule.

    Raises:
        UsageError: The rule does not exist, or needs a package that is not installed.
    """
    if plan.stop is None or plan.metric is None:
        return None
    stopped = stopped_members(run_dir)  # an earlier follower may have stopped some
    return ArrayStops(plan, run_dir, load_rule(plan.stop, plan.metric), stopped)


def cancel_member(run_dir: RunDir, loaded: tuple[ArrayDialect, SweepArrays], number: int) -> None:
    """Cancel one member.

    Raises:
        MusterError: It can't be cancelled: it may have ended.
    """
    if (pods := object_members(loaded[0])) is not None:
        pods.stop(run_dir, number)
    elif (element := element_of(loaded, number)) is not None:
        cancel_job(loaded[0], element)
