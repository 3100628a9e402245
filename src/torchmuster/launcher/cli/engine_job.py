"""The test job of `muster engines check`: submit it like `muster run`, follow it, say what it found."""

import contextlib
import io
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.place import begin, row, warn
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, last_lines, runs_dir
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.create import new_run_id, room_warnings
from torchmuster.core.owner.record import read_result
from torchmuster.core.spec.launch import RunRequest, read_job_limits
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import ManyErrors, MusterError
from torchmuster.launcher.jobs.conduct import describe_difference
from torchmuster.launcher.jobs.jobs import NeverStartsWatch, cancel_job, read_job
from torchmuster.launcher.model.job import JobView, describe_job
from torchmuster.launcher.views.find import view_job

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Place

_JOB_LIMIT = "5m"
_LOOK_S = 0.2
_SETTLE_S = 10.0  # from the job's end to its result, which a shared file system may show late
_pause = threading.Event().wait


def try_job(place: "Place", timeout_s: float) -> list[dict[str, Any]]:
    """Submit a test job, wait for it, and return the table's rows."""
    run_dir = RunDir(os.path.join(runs_dir(), new_run_id("check")))
    begun = time.monotonic()
    try:
        _submit(place, run_dir)
    except MusterError as error:
        return [row("test job", ok=False, found=_say_error(error))]
    except ManyErrors as many:
        found = "; ".join(_say_error(error) for error in many.errors)
        return [row("test job", ok=False, found=found)]
    click.echo(f"muster: test job submitted, files in {run_dir.path}", err=True)
    rows = [row("room", ok=None, found=text) for text in room_warnings(run_dir.path)]
    watch = JobWatch(run_dir, view_job, lambda text: warn([text]), begun, timeout_s)
    try:
        in_time = watch.follow()
    except KeyboardInterrupt:
        _cancel(run_dir)
        raise
    if in_time:
        return [*rows, *_job_rows(watch)]
    _cancel(run_dir)
    where = "was running" if watch.waited_s is not None else "had not started"
    what = f"it {where} after {timeout_s:g} s{watch.reason}: cancelled"
    return [*rows, row("test job", ok=False, found=what)]


def _submit(place: "Place", run_dir: RunDir) -> None:
    """Start a run of the probe as `muster run --on NAME --detach` does.

    Raises:
        MusterError: It could not be submitted.
        ManyErrors: The site's section can't be used for it.
    """
    request = RunRequest(
        script=os.path.join(os.path.dirname(os.path.abspath(__file__)), "check_probe.py"),
        args=(os.getcwd(), _findings_path(run_dir)),
        nodes="1",
        nproc_per_node="1",
        max_restarts=0,
        start="fresh",
        tee="none",
        time_limit=_JOB_LIMIT,
    )
    problems = Problems()
    limits = read_job_limits(request, problems)
    plan = place.plan(request, os.path.basename(run_dir.path), limits, problems)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the run's name
        begin(place, problems.checked(plan), detach=True)


@dataclass(slots=True)
class JobWatch:
    """Watches a test job until it has a result, is gone, or its time is up.

    Attributes:
        look: Returns the scheduler's view of a run's job.
        say: Called with every new state of the job.
        submitted_at: Time of the submission, on the monotonic clock.
        timeout_s: The longest wait from then on, in seconds.
        view: The scheduler's last answer.
        waited_s: Seconds from the submission to the first sign of the job, as seen from here.
    """

    run_dir: RunDir
    look: Callable[[RunDir], JobView | None]
    say: Callable[[str], None]
    submitted_at: float
    timeout_s: float
    view: JobView | None = None
    waited_s: float | None = None
    result: Result | None = None
    _gone_at: float | None = None
    _never: NeverStartsWatch = field(default_factory=NeverStartsWatch)

    def follow(self) -> bool:
        """Wait for the end of the job; return whether it came within the time."""
        while (result := read_result(self.run_dir)) is None:
            now = time.monotonic()
            self._see(now)
            self._never.cancel_if_hopeless(self.run_dir)
            if self._gone_at is not None and now - self._gone_at > _SETTLE_S:
                break
            if now - self.submitted_at > self.timeout_s:
                self._see_start(now)
                return False
            _pause(_LOOK_S)
        self.result = result
        self._see_start(time.monotonic())
        return True

    @property
    def reason(self) -> str:
        """The scheduler's reason for the last state, after a sentence; empty if there is none."""
        return f" ({self.view.reason})" if self.view is not None and self.view.reason else ""

    def _see(self, now: float) -> None:
        self._see_start(now)
        seen = self.look(self.run_dir)
        if seen is not None and seen != self.view:
            self.say(describe_job(seen))
            self.view = seen
        if seen is None or seen.state.is_final:
            self._gone_at = self._gone_at or now

    def _see_start(self, now: float) -> None:
        """Note the job's start: its head has written its first event."""
        with contextlib.suppress(OSError):
            if self.waited_s is None and os.path.getsize(self.run_dir.events) > 0:
                self.waited_s = now - self.submitted_at


def _findings_path(run_dir: RunDir) -> str:
    return os.path.join(run_dir.path, "check.json")


def _job_rows(watch: JobWatch) -> list[dict[str, Any]]:
    """Return the findings of a test job that has ended as rows."""
    found = atomic.read_json(_findings_path(watch.run_dir))
    if watch.result is None or watch.result.exit_code or not isinstance(found, dict):
        return [row("test job", ok=False, found=_why_not(watch))]
    waited = f"{watch.waited_s or 0.0:.1f} s from submission to start"
    rows = [row("test job", ok=True, found=f"ran on {found['node']}, {waited}")]
    here, there = platform.machine(), str(found["processor"])
    line = describe_difference(here, str(found["node"]), there)
    is_same = True if line is None else None
    rows.append(row("processor", ok=is_same, found=line or f"{there}, as here"))
    python = f"{found['python']}: {found['python_version']}, {found['cpus']} CPUs"
    rows.append(row("python", ok=True, found=python))
    if "torch" in found:
        rows.append(row("torch", ok=True, found=f"{found['torch']}, {found['gpus']} GPUs"))
    else:
        rows.append(row("torch", ok=False, found=str(found.get("torch_error"))))
    rows.append(row("run directory", ok=True, found="read and written there"))
    cwd = os.getcwd()
    seen = (
        "is there too"
        if found["sees_cwd"]
        else "does not exist there: put the code on a shared disk"
    )
    rows.append(row("working directory", ok=bool(found["sees_cwd"]), found=f"{cwd} {seen}"))
    return rows


def _why_not(watch: JobWatch) -> str:
    if watch.result is not None and watch.result.report is not None:
        report = watch.result.report
        return ". ".join([report.error, *report.because[:3]])
    lines = last_lines(watch.run_dir.job_log, 8192, 8192)
    last = [line for line in lines if line.strip()][-1:]
    state_words = (
        f"the job is {watch.view.state.value}" if watch.view is not None else "the job is gone"
    )
    return ": ".join([f"{state_words}{watch.reason}, without a result", *last])


def _say_error(error: Any) -> str:
    words = (str(error.what), str(error.why).splitlines()[0] if error.why else None, error.fix)
    return ": ".join(word for word in words if word)


def _cancel(run_dir: RunDir) -> None:
    job = read_job(run_dir)
    if job is not None:
        with contextlib.suppress(MusterError):  # it may have ended just now
            cancel_job(*job)
