"""`muster sweep --on ENGINE`: submit all members as a job array, follow them, stop the worst early."""

import asyncio
import contextlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.files.layout import RunDir, runs_dir, short_id
from torchmuster.core.model.codec import event_line, utc_now
from torchmuster.core.model.states import RunState
from torchmuster.errors import ManyErrors, MusterError, UsageError
from torchmuster.launcher.engines.base import ArrayDialect
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs.answers import FIRST_POLL_S, LAST_POLL_S
from torchmuster.launcher.jobs.batch import JobsFollower
from torchmuster.launcher.jobs.jobs import cancel_job, make_job, note_refusal
from torchmuster.launcher.views.elsewhere import copied, is_elsewhere
from torchmuster.multirun.sweep import arrays
from torchmuster.multirun.sweep.members import member_dir
from torchmuster.multirun.sweep.metric import MetricReader, StopRule, load_rule
from torchmuster.multirun.sweep.plan import SweepPlan
from torchmuster.multirun.views.sweep_view import SweepView, stopped_members, view_arrays

if TYPE_CHECKING:
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.spec.site import Site


def submit_sweep(given: dict[str, Any], site: "Site", problems: "Problems") -> int:
    """Submit a sweep and follow it until it ends; Ctrl-C stops following, twice cancels it."""
    from torchmuster.core.spec.launch import read_job_limits
    from torchmuster.launcher.engines.sites import with_node_setup
    from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request
    from torchmuster.multirun.sweep.members import create_sweep_dir

    request = sweep_request(given)
    limits = read_job_limits(request, problems)
    check_stop_rule(given, problems)
    try:
        dialect = arrays.find_arrays(load_dialect(site.kind), f"--on {site.name}")
    except UsageError as error:
        problems.found.append(error)
        raise ManyErrors(problems.found) from error
    gpus = [str(n) for n in range(request.gpus_per_node or site.gpus_per_node or 0)]
    plan = plan_sweep(given, request, gpus, problems, is_job=True)
    run = with_node_setup(plan.run, site, python_given=request.python is not None)
    plan = replace(plan, run=run)
    members = range(len(plan.members))
    if given["dry_run"]:
        run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
        one = arrays.request_of(make_job(run, run_dir, site, request, limits), run_dir, site.kind)
        job = arrays.array_request(one, members, 0, plan.slots)
        click.echo(f"$ {shlex.join(dialect.submit_argv(job, run_dir.job_script))}\n")
        click.echo(dialect.script(job), nl=False)
        click.echo("nothing was submitted (--dry-run)", err=True)
        return 0
    stops_of(plan, RunDir(""))  # fail before anything is created
    run_dir = create_sweep_dir(plan)
    with note_refusal(run_dir):
        one = arrays.request_of(make_job(run, run_dir, site, request, limits), run_dir, site.kind)
        for sentence in dialect.unmapped(one):
            click.echo(f"muster: {sentence}", err=True)
        job_ids = arrays.submit_members(plan, run_dir, dialect, one, members)
    return follow_unless(plan, run_dir, job_ids, dialect.name, detach=given["detach"])


def check_stop_rule(given: dict[str, Any], problems: "Problems") -> None:
    """Refuse a stop rule with `--detach`: no command would follow the sweep to apply it."""
    if given["stop"] is not None and given["detach"]:
        why = "members of a job array have no owner: the command that follows them compares them"
        fix = "leave out --detach, or in a job of your own: muster sweep --here --stop ..."
        problems.add("`--stop` can't end members that nobody follows", "--stop", why, fix)


def submit_again(
    plan: "SweepPlan", run_dir: "RunDir", members: Sequence[int], *, detach: bool
) -> int:
    """Submit these members of a sweep again."""
    loaded = arrays.load_arrays(run_dir)
    if loaded is None:
        raise UsageError("the arrays of the sweep can't be read", where=run_dir.arrays)
    dialect, noted = loaded
    if noted.request is None:
        raise UsageError(
            f"the sweep {short_id(plan.run_id)} was submitted on another machine",
            where=run_dir.path,
            why="its code, and what it asked of the cluster, are there",
            fix="restart it there",
        )
    for path in (
        run_dir.result,
        run_dir.cancelled,
        *(member_dir(run_dir, plan, n).result for n in members),
    ):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # a member that waits in the queue has not ended
    job_ids: tuple[str, ...]
    if (pods := arrays.object_members(dialect)) is not None:
        job_ids = (pods.submit(plan, run_dir, noted.request, members, detach=detach),)
    else:
        job_ids = arrays.submit_members(plan, run_dir, dialect, noted.request, members)
    return follow_unless(plan, run_dir, job_ids, dialect.name, detach=detach)


def follow_unless(
    plan: "SweepPlan", run_dir: "RunDir", job_ids: Sequence[str], engine: str, *, detach: bool
) -> int:
    """Follow the sweep until it ends; with `detach`, only print its id."""
    from torchmuster.core.cli.ending import note_start, print_id
    from torchmuster.core.files.terminal import TerminalVoice

    note_start(run_dir)
    if detach:
        return print_id(plan.run_id)
    voice = TerminalVoice()
    voice.start()
    try:
        name = short_id(plan.run_id)
        jobs = f"job{'s' if len(job_ids) > 1 else ''} {', '.join(job_ids)}"
        voice.say(f"sweep {name} is {jobs} of {engine}; muster status {name}")
        return _follow(plan, run_dir, engine, voice)
    finally:
        voice.flush(5.0)


def _follow(plan: "SweepPlan", run_dir: "RunDir", engine: str, voice: "TerminalVoice") -> int:
    from torchmuster.core.cli.ending import CONTINUES_CODE
    from torchmuster.multirun.cli.sweep_record import say_end

    with copied(run_dir):
        view = asyncio.run(_SweepFollower(plan, run_dir, engine, voice).follow())
    voice.show_status(())
    if view is not None and is_elsewhere(run_dir):
        view = view_arrays(run_dir)  # with the records that were copied last
    if view is None or view.result is None:
        voice.say(f"the sweep continues: muster wait {short_id(plan.run_id)}")
        return CONTINUES_CODE
    say_end(view, view.result, voice, run_dir)
    return view.result.exit_code


class _SweepFollower(JobsFollower["SweepView"]):
    """Reports the members' states when they change, until all end; a terminal gets a table."""

    def __init__(
        self, plan: "SweepPlan", run_dir: "RunDir", engine: str, voice: "TerminalVoice"
    ) -> None:
        super().__init__(voice, engine)
        self._run_dir = run_dir
        self._stops = stops_of(plan, run_dir)
        self._view: SweepView | None = None
        self._shown: SweepView | None = None
        self._said, self._text, self._pause_s = "", "", FIRST_POLL_S

    def ended(self) -> "SweepView | None":
        return self._view if self._view is not None and self._view.result is not None else None

    def cancel(self) -> None:
        arrays.cancel_sweep(self._run_dir)

    def ask(self) -> float:
        from torchmuster.multirun.cli.sweep_record import counted

        view = view_arrays(self._run_dir)
        text = counted(view) if view is not None else "its plan can't be read"
        if view is not None and self._stops is not None:
            self._stops.look(view)
        most_s = FIRST_POLL_S if self._stops is not None else LAST_POLL_S
        is_news = text != self._text
        self._pause_s = FIRST_POLL_S if is_news else min(1.5 * self._pause_s, most_s)
        self._view, self._text = view, text
        return self._pause_s

    async def take_answer(self) -> bool:
        return self._view is None

    def show(self) -> None:
        if self._text != self._said:
            self.voice.say(self._text)
            self._said = self._text
        if self._view is not self._shown:
            self._shown = self._view
            self.voice.show_status(_live_table(self._view) if self._view is not None else ())


def _live_table(view: "SweepView") -> list[str]:
    """Return the table rows for a terminal while members run; none if not wanted."""
    import shutil

    from torchmuster.core.cli.ending import wanted
    from torchmuster.launcher.cli.follow import is_drawable
    from torchmuster.multirun.cli.sweep_record import members_table

    if wanted() == "off" or not is_drawable():
        return []
    columns, lines = shutil.get_terminal_size()
    rows = [row[: columns - 1] for row in members_table(view).splitlines()]
    most = max(1, lines // 2)
    left = len(rows) - most
    return rows if left <= 0 else [*rows[: most - 1], f"and {left + 1} more: muster status"]


# Early stop of the worst members of job arrays, by the command that follows the sweep.


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
        loaded = arrays.load_arrays(self.run_dir)
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
        self, number: int, reader: MetricReader, loaded: tuple[ArrayDialect, arrays.SweepArrays]
    ) -> None:
        if arrays.element_of(loaded, number) is None:
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


def cancel_member(
    run_dir: RunDir, loaded: tuple[ArrayDialect, arrays.SweepArrays], number: int
) -> None:
    """Cancel one member.

    Raises:
        MusterError: It can't be cancelled: it may have ended.
    """
    if (pods := arrays.object_members(loaded[0])) is not None:
        pods.stop(run_dir, number)
    elif (element := arrays.element_of(loaded, number)) is not None:
        cancel_job(loaded[0], element)
