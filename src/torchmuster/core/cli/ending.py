"""How a command follows a run: its terminal, the verdict, the last lines, the exit code."""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.errors import MusterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result, WorkflowResult
    from torchmuster.launcher.engines.base import Dialect
    from torchmuster.launcher.views.debugger import DebuggerDoor
    from torchmuster.workflow.plan import WorkflowPlan


# `muster run --on ENGINE`: a run as a job of a scheduler, and a run inside a job that is there already.


# The status below the output of a run that is followed on a terminal: read and drawn beside everything else.


CHOICES = ("off", "line", "full")
_KEY = "torchmuster.progress"
_BEGIN_S = 5.0  # a shorter run needs none, and its start needs the processor
_EVERY_S = 2.0  # agents report as often


def _keep(context: click.Context, _: click.Parameter, value: str | None) -> None:
    context.meta[_KEY] = value


option = click.option(
    "--progress",
    type=click.Choice(CHOICES),
    expose_value=False,  # read where the run is followed, behind many calls that don't care
    callback=_keep,
    help="Status below the output, on a terminal: no, one row (default) or two.",
)


class StatusLine:
    """Draws the status of a run until it is closed; does nothing where nobody would see it.

    Args:
        voice: Writes on the terminal.
        run_dir: Of the run.
        kind: One of `CHOICES`.
    """

    def __init__(self, voice: "TerminalVoice", run_dir: "RunDir", kind: str) -> None:
        self._voice, self._run_dir = voice, run_dir
        self._num_rows = CHOICES.index(kind)
        self._ends = threading.Event()
        self._shows = threading.Lock()  # no rows come behind the end

    def start(self) -> None:
        """Begin after some seconds."""
        if self._num_rows and is_drawable():
            threading.Thread(target=self._work, name="status", daemon=True).start()

    def close(self) -> None:
        """Draw no more, and take away what stands there."""
        with self._shows:
            if not self._ends.is_set():
                self._ends.set()
                self._voice.show_status(())

    def _work(self) -> None:
        if self._ends.wait(_BEGIN_S):
            return
        from torchmuster.core.owner.record import DAMAGED
        from torchmuster.launcher.ui.status_line import status_rows
        from torchmuster.launcher.views.board_watch import BoardWatch
        from torchmuster.launcher.views.find import view_run
        from torchmuster.launcher.views.live import LiveReader

        view = view_run(self._run_dir)
        watch = BoardWatch(view, ask_every_s=_EVERY_S)
        if view.has_ranks:
            watch.start()
        reader = LiveReader(self._run_dir, watch.newest)
        while not self._ends.wait(_EVERY_S):
            with suppress(
                MusterError, OSError, *DAMAGED
            ):  # a scheduler or a disk that does not answer now
                columns = os.get_terminal_size(2).columns
                rows = status_rows(reader.read(), columns or 80, self._num_rows)
                with self._shows:
                    if not self._ends.is_set():
                        self._voice.show_status(_painted(rows))
        watch.close()


def is_drawable() -> bool:
    """Say whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def wanted() -> str:
    """Return what the command that runs now was told by `--progress`."""
    context = click.get_current_context(silent=True)
    return (context.meta.get(_KEY) if context is not None else None) or CHOICES[1]


def _painted(rows: list[str]) -> list[str]:
    if os.environ.get("NO_COLOR"):
        return rows
    return [f"\x1b[2m{row}\x1b[0m" for row in rows]


GOES_ON = 130
# This process owns the run in the background, and its caller waits for the run's id.
is_launched = False
# `muster dev` shows what the ranks print and why they failed, and says the rest in a line of its own.
is_brief = False


def follow_run(
    plan: "RunPlan | WorkflowPlan",
    run_dir: "RunDir",
    follow: "Callable[[TerminalVoice], Result | WorkflowResult | None]",
    *,
    as_json: bool = False,
) -> int:
    """Follow a run on the terminal, say how it has ended, and return its exit code.

    `follow` returns None where the run continues without this process, and has said how to see it again.
    """
    from torchmuster.core.model import codec

    go_to_the_background(plan.run_id, run_dir)
    voice = _voice_for(plan, run_dir)
    voice.start()
    debugger = getattr(plan, "debugger", None)
    is_quiet = _is_read_by_doctor(plan) or debugger == "pdb"
    status = StatusLine(voice, run_dir, "off" if is_quiet else wanted())
    status.start()
    door = _open_to_debuggers(plan, run_dir, voice) if debugger is not None else None
    try:
        result = follow(voice)
        status.close()
        code = GOES_ON
        if result is not None:
            code = say_end(voice, result, run_dir, is_read=_is_read_by_doctor(plan))
    finally:
        status.close()
        if door is not None:
            door.close()
        voice.flush(5.0)
    if as_json and result is not None:
        click.echo(json.dumps(codec.to_plain(result), indent=1))
    return code


def follow_job(
    plan: "RunPlan",
    run_dir: "RunDir",
    dialect: "Dialect",
    job_id: str,
    voice: "TerminalVoice",
    fix: "Callable[[], str]",
) -> "Result | None":
    """Show a job to its end and return the result; None when it goes on without us.

    Raises:
        MusterError: It has ended without a result; `fix` says what to do then.
    """
    import asyncio

    from torchmuster.core.files import atomic
    from torchmuster.core.files.layout import last_lines
    from torchmuster.core.model import codec
    from torchmuster.core.model.states import JobState
    from torchmuster.launcher.jobs.batch import JobFollower
    from torchmuster.launcher.jobs.jobs import cancelled_before_start

    follower = JobFollower(plan, run_dir, dialect, job_id, voice)
    try:
        result = asyncio.run(follower.follow())
    finally:
        follower.close()
    view = follower.view
    is_cancelled = view is not None and view.state is JobState.CANCELLED
    if result is None and is_cancelled and os.path.exists(run_dir.cancelled):
        result = cancelled_before_start(run_dir)  # it was in the queue: there is no head
        atomic.write_json(run_dir.result, codec.to_plain(result))
    if result is None and view is not None and view.state.is_final:
        told = "\n".join(last_lines(run_dir.job_log, 12))
        silent = f"it has written nothing: its node may not see {run_dir.path}"
        checks = f"muster engines check {plan.engine}  # says what the nodes see"
        raise MusterError(
            f"job {job_id} ended without a result: {view.state.value}",
            where=run_dir.job_log,
            why=told or "\n".join(word for word in (view.reason, silent) if word),
            fix=fix() if told else checks,
        )
    return result


def shown_here(plan: "RunPlan", *, detach: bool = False) -> "RunPlan":
    """Return the plan of a run that this process shows, unless `detach`: a file or a pipe gets every line."""
    from torchmuster.core.files.terminal import every_line_streams

    return replace(plan, every_line=() if detach or is_launched else every_line_streams())


def _voice_for(plan: "RunPlan | WorkflowPlan", run_dir: "RunDir") -> "TerminalVoice":
    from torchmuster.core.files.disk import DiskWriter
    from torchmuster.core.files.terminal import BriefVoice, TerminalVoice

    kind = BriefVoice if is_brief else TerminalVoice
    voice = kind(prefix_always=_shows_several(plan))
    if getattr(plan, "every_line", ()):
        disk = DiskWriter(voice.lose, run_dir.path)
        disk.start()
        voice.write_every_line(lambda: run_dir.unread, disk)
    return voice


def _open_to_debuggers(
    plan: "RunPlan | WorkflowPlan", run_dir: "RunDir", voice: "TerminalVoice"
) -> "DebuggerDoor":
    """Bring the user's debugger to the rank that waits for it, while the run is followed here."""
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.launcher.views.debugger import DebuggerDoor

    folder = plan.program.cwd if isinstance(plan, RunPlan) else os.getcwd()
    door = DebuggerDoor(run_dir, folder, voice.explain, voice.print)
    door.start()
    return door


def go_to_the_background(run_id: str, run_dir: "RunDir") -> None:
    """Say the run's id to who has started this process, if it is `launched`; all else goes into a file, as of `--detach`."""
    global is_launched
    if not is_launched:
        return
    is_launched = False
    log = os.open(run_dir.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    print_id(run_id)
    sys.stdout.flush()
    sys.stderr.flush()
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)


def _is_read_by_doctor(plan: "RunPlan | WorkflowPlan") -> bool:
    """Say whether `muster doctor` has made the run: it says itself how the run ended, behind what it has found."""
    from torchmuster.core.model.plan import RunPlan

    return isinstance(plan, RunPlan) and plan.preflight in ("long", "only")


def _shows_several(plan: "RunPlan | WorkflowPlan") -> bool:
    """Say whether lines of several ranks or tasks mix, so that each needs its name from the first one on."""
    from torchmuster.core.model.plan import RunPlan, Tee

    if isinstance(plan, RunPlan):
        return plan.tee is Tee.ALL and (plan.max_nodes > 1 or plan.num_workers(0) > 1)
    return sum(len(group.tasks) for group in plan.groups) > 1


def leave_in_background(run_dir: "RunDir", run_id: str, *, as_json: bool = False) -> int:
    """Let a process of its own follow the run; print the run's id."""
    from torchmuster.core.owner.detach import detach_supervisor

    detach_supervisor(run_dir)
    return print_id(run_id, as_json=as_json)


def print_id(run_id: str, *, as_json: bool = False, **more: Any) -> int:
    """Print the id of a run that nobody follows here."""
    click.echo(json.dumps({"run_id": run_id, **more}) if as_json else run_id)
    return 0


def last_line(result: "Result", run_dir: "RunDir") -> str:
    """Return the last line of a run: how it ended, and how to go on if that was no success."""
    from torchmuster.core.cli.messages import summary
    from torchmuster.core.model.states import RunState
    from torchmuster.core.owner.account import how_to_go_on, whole

    went_well = result.state is RunState.SUCCEEDED
    return summary(whole(result, run_dir), None if went_well else how_to_go_on(run_dir, result))


def say_end(
    voice: "TerminalVoice",
    result: "Result | WorkflowResult",
    run_dir: "RunDir",
    *,
    is_read: bool = False,
) -> int:
    """Say how a run or a workflow has ended, unless its caller reads and says it; return its exit code."""
    from torchmuster.core.cli.messages import paint_report, uses_colour, workflow_summary
    from torchmuster.core.model.states import State
    from torchmuster.core.model.verdict import WorkflowResult

    if not isinstance(result, WorkflowResult):
        return _say_end_of_run(voice, result, run_dir, is_read=is_read)
    for report in result.reports:
        voice.print(paint_report(report, colour=uses_colour()))
    voice.say(workflow_summary(result))
    if not result.state.is_failed:
        from torchmuster.core.owner.account import what_a_workflow_left

        voice.say(what_a_workflow_left(run_dir, tuple(result.groups)))
    elif result.state is not State.FAILED_CANCELED:
        _say_report(voice, run_dir, result.run_id)
    return result.exit_code


def _say_end_of_run(
    voice: "TerminalVoice", result: "Result", run_dir: "RunDir", *, is_read: bool
) -> int:
    from torchmuster.core.cli.messages import last_report, paint_report, uses_colour
    from torchmuster.core.model.states import RunState
    from torchmuster.core.owner.record import keep_result

    is_wanted = not is_read and not (is_brief and result.state is RunState.CANCELLED)
    report = last_report(result, run_dir, voice.shown) if is_wanted else None
    if report is not None:
        voice.print(paint_report(report, colour=uses_colour()))
    if not is_read:
        voice.say(last_line(result, run_dir))
    if (why := keep_result(run_dir, result)) is not None:
        voice.say(
            f"this end can't be recorded in {run_dir.path} ({why}): `muster status` won't know of it"
        )
    if not is_read and result.state is RunState.SUCCEEDED and os.path.isdir(run_dir.path):
        from torchmuster.core.owner.account import what_is_left

        voice.say(what_is_left(run_dir))
    failed = (RunState.FAILED, RunState.TIMED_OUT, RunState.LOST)
    if not is_read and result.state in failed:
        _say_report(voice, run_dir, result.run_id)
    return int(result.exit_code)


def _say_report(voice: "TerminalVoice", run_dir: "RunDir", run_id: str) -> None:
    """Say where the page of a failed run is, or how to make it, when all else has been said; a replay needs none."""
    from torchmuster.core.owner.record import read_plan

    plan = read_plan(run_dir)
    if os.path.isdir(run_dir.path) and not (plan is not None and plan.is_replay):
        from torchmuster.report.at_end import report_at_end

        voice.say(report_at_end(run_dir, run_id))


def ended_with_pods(run_dir: "RunDir", result: "Result") -> bool:
    """Say whether what a run in pods has left may be on its cluster alone: the last line does not say where."""
    from torchmuster.core.model.states import RunState
    from torchmuster.errors import MissingRecordError

    is_left = result.state in (RunState.LOST, RunState.CANCELLED)
    is_left |= result.exit_code == MissingRecordError.exit_code
    return is_left and os.path.isdir(os.path.join(run_dir.path, "pods"))
