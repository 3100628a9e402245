"""The test job of `muster engines check`: submits it like `muster run`, and shows its findings."""

import contextlib
import io
import os
import platform
import time
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.place import row

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Place
    from torchmuster.core.files.layout import RunDir
    from torchmuster.launcher.jobs.check_job import JobCheck

_JOB_LIMIT = "5m"


def try_job(place: "Place", timeout_s: float) -> list[dict[str, Any]]:
    """Submit a test job, wait for it, and return the table's rows."""
    from torchmuster.core.files.layout import RunDir, runs_dir
    from torchmuster.core.owner.create import new_run_id, room_warnings
    from torchmuster.errors import ManyErrors, MusterError
    from torchmuster.launcher.jobs.check_job import JobWatch
    from torchmuster.launcher.views.find import view_job

    run_dir = RunDir(os.path.join(runs_dir(), new_run_id("check")))
    begun = time.monotonic()
    try:
        submit_test_run(place, run_dir)
    except MusterError as error:
        return [row("test job", ok=False, found=_say_error(error))]
    except ManyErrors as many:
        found = "; ".join(_say_error(error) for error in many.errors)
        return [row("test job", ok=False, found=found)]
    click.echo(f"muster: test job submitted, files in {run_dir.path}", err=True)
    rows = [row("room", ok=None, found=text) for text in room_warnings(run_dir.path)]
    try:
        check = JobWatch(run_dir, view_job, _say, begun, timeout_s).follow()
    except KeyboardInterrupt:
        _cancel(run_dir.path)
        raise
    if not check.in_time:
        _cancel(run_dir.path)
    return [*rows, *job_rows(check, platform.machine(), timeout_s)]


def submit_test_run(place: "Place", run_dir: "RunDir") -> None:
    """Start a run of the probe as `muster run --on NAME --detach` does.

    Raises:
        MusterError: It could not be submitted.
        ManyErrors: The site's section can't be used for it.
    """
    from torchmuster.core.cli.place import begin
    from torchmuster.core.spec.launch import RunRequest, read_job_limits
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.jobs.check_job import findings_path, probe_path

    request = RunRequest(
        script=probe_path(),
        args=(os.getcwd(), findings_path(run_dir)),
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


def job_rows(check: "JobCheck", here: str, timeout_s: float) -> list[dict[str, Any]]:
    """Return the findings of a test job as rows."""
    if not check.in_time:
        where = "was running" if check.waited_s is not None else "had not started"
        reason = f" ({check.view.reason})" if check.view is not None and check.view.reason else ""
        what = f"it {where} after {timeout_s:g} s{reason}: cancelled"
        return [row("test job", ok=False, found=what)]
    found = check.found
    if check.result is None or check.result.exit_code or found is None:
        return [row("test job", ok=False, found=_why_not(check))]
    waited = f"{check.waited_s or 0.0:.1f} s from submission to start"
    rows = [row("test job", ok=True, found=f"ran on {found['node']}, {waited}")]
    rows.append(_processor_row(found, here))
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


def _processor_row(found: dict[str, Any], here: str) -> dict[str, Any]:
    from torchmuster.launcher.jobs.conduct import describe_difference

    line = describe_difference(here, str(found["node"]), str(found["processor"]))
    if line is None:
        return row("processor", ok=True, found=f"{found['processor']}, as here")
    return row("processor", ok=None, found=line)


def _why_not(check: "JobCheck") -> str:
    if check.result is not None and check.result.report is not None:
        report = check.result.report
        return ". ".join([report.error, *report.because[:3]])
    last = check.log.splitlines()[-1] if check.log else ""
    state_words = (
        f"the job is {check.view.state.value}" if check.view is not None else "the job is gone"
    )
    reason = f" ({check.view.reason})" if check.view is not None and check.view.reason else ""
    return f"{state_words}{reason}, without a result" + (f": {last}" if last else "")


def _say(text: str) -> None:
    click.echo(f"muster: {text}", err=True)


def _say_error(error: Any) -> str:
    words = (str(error.what), str(error.why).splitlines()[0] if error.why else None, error.fix)
    return ": ".join(word for word in words if word)


def _cancel(path: str) -> None:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.errors import MusterError
    from torchmuster.launcher.jobs.jobs import cancel_job, read_job

    job = read_job(RunDir(path))
    if job is not None:
        with contextlib.suppress(MusterError):  # it may have ended just now
            cancel_job(*job)
