"""Run a workflow as jobs of a scheduler: submit all at once, so that no client has to stay."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model import codec
from torchmuster.core.model.text import report_of_error
from torchmuster.core.owner.record import Follow
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.base import Dialect
from torchmuster.launcher.engines.sites import job_of_site
from torchmuster.launcher.jobs.batch import JobsFollower
from torchmuster.launcher.jobs.jobs import NeverStartsWatch, cancel_job, submit_script, view_jobs
from torchmuster.launcher.views.find import view_run
from torchmuster.workflow.jobs import plan_jobs
from torchmuster.workflow.owner.view import WorkflowRun, WorkflowView, task_logs
from torchmuster.workflow.owner.workflow import link_reused_outputs
from torchmuster.workflow.plan import WorkflowPlan
from torchmuster.workflow.record import State, WorkflowResult, note_group

if TYPE_CHECKING:
    from torchmuster.launcher.spec.site import Site

_POLL_S = 1.0


def submit_groups(
    plan: WorkflowPlan, run_dir: RunDir, dialect: Dialect, site: "Site"
) -> dict[str, str]:
    """Submit one job per group, with dependencies; return the job id of each group.

    Raises:
        JobRefusedError: The scheduler refused a job; the jobs before it are cancelled.
    """
    link_reused_outputs(plan, run_dir)
    job_ids: dict[str, str] = {group.name: "0" for group in plan.groups}
    site_job = job_of_site(site)
    order = [job.group for job in plan_jobs(plan, dialect, run_dir, site_job, job_ids)]
    submitted: dict[str, str] = {}
    try:
        for name in order:
            # Plan again for each job: only now are the ids of the jobs that it waits for known.
            jobs = plan_jobs(plan, dialect, run_dir, site_job, {**job_ids, **submitted})
            job = next(entry.job for entry in jobs if entry.group == name)
            folder = run_dir.group(name)
            os.makedirs(folder.path, exist_ok=True)
            submitted[name] = submit_script(job, folder.job_script, dialect)
            atomic.write_json(folder.job, {"engine": dialect.name, "job_id": submitted[name]})
    except MusterError as error:
        _cancel_all(dialect, submitted)
        _note_refusal(plan, run_dir, error)
        raise
    atomic.write_json(run_dir.jobs, {"engine": dialect.name, "site": site.name, "jobs": submitted})
    return submitted


def _note_refusal(plan: WorkflowPlan, run_dir: RunDir, error: MusterError) -> None:
    """Write the error of a submission as the result, so that the workflow counts as ended."""
    state = State.FAILED_BACKEND_ERROR
    result = WorkflowResult(
        run_id=plan.run_id,
        state=state,
        exit_code=error.exit_code,
        elapsed_s=0.0,
        groups={group.name: state.value for group in plan.groups},
        reports=(report_of_error(error),),
    )
    atomic.write_json(run_dir.result, codec.to_plain(result))


def _cancel_all(dialect: Dialect, job_ids: Mapping[str, str]) -> None:
    for job_id in job_ids.values():
        try:
            cancel_job(dialect, job_id)
        except MusterError:
            continue  # the job may have ended


class WorkflowFollower(JobsFollower[WorkflowView]):
    """Shows the states of a workflow's groups until all have ended."""

    def __init__(
        self, run_dir: RunDir, dialect: Dialect, job_ids: Mapping[str, str], voice: TerminalVoice
    ) -> None:
        super().__init__(voice, dialect.name)
        self.run_dir = run_dir
        self.dialect = dialect
        self.job_ids = job_ids
        self._view: WorkflowView | None = None
        self._shown: WorkflowView | None = None
        self._said: dict[str, str] = {}
        self._logs = Follow()
        self._numbers: dict[str, int] = {}
        self._never = NeverStartsWatch()

    def ended(self) -> WorkflowView | None:
        """Return the view of the workflow once all its groups have ended."""
        view = self._view
        is_over = view is not None and all(group.state.is_final for group in view.groups)
        return view if is_over else None

    def cancel(self) -> None:
        """Cancel all jobs."""
        _cancel_all(self.dialect, self.job_ids)

    def ask(self) -> float:
        """Update the groups' states; end those that can never start; return the seconds to wait."""
        run = view_run(self.run_dir)
        if isinstance(run, WorkflowRun) and run.workflow is not None:
            self._cancel_unstartable(run.workflow)
            self._view = run.workflow
        return _POLL_S

    def _cancel_unstartable(self, view: WorkflowView) -> None:
        """Cancel the jobs of groups that can never start; groups that need their output fail."""
        for group in view.groups:
            if group.state is not State.SCHEDULING or group.name not in self.job_ids:
                continue
            job_id = self.job_ids[group.name]
            job = view_jobs(self.dialect, [job_id]).get(job_id)
            report = self._never.judge(job, self.dialect)
            if report is not None:
                note_group(self.run_dir, group.name, report)
                _cancel_all(self.dialect, {group.name: job_id})

    def show(self) -> None:
        """Show new output of the tasks, and changes of the groups' states."""
        view = self._view
        if view is None or view is self._shown:
            return
        self._shown = view
        found = task_logs(view, self.run_dir)
        for task, text in self._logs.texts(
            (name, path) for name, logs in found for _, path in logs
        ):
            number = self._numbers.setdefault(task, len(self._numbers))
            self.voice.name_rank(number, task)
            self.voice.show(number, 1, text, 0)
        for group in view.groups:
            text = group.state.value + (f": {group.why}" if group.why else "")
            if self._said.get(group.name) != text and group.state is not State.SUBMITTING:
                self._said[group.name] = text
                self.voice.say(f"group {group.name} is {text}")
