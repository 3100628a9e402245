"""What a workflow needs of a place: what is refused there, shown, and started."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.workflow.owner.capacity import Machine
    from torchmuster.workflow.plan import WorkflowPlan


class WorkflowAt:
    """A workflow at a place.

    Attributes:
        is_this_machine: What this machine has decides which tasks can run.
    """

    is_this_machine = False

    def __init__(self, place: Any) -> None:
        self.place = place

    def check(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        """Refuse what can't be done here, before anything exists.

        Raises:
            ManyErrors: Everything of it.
        """

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        """Print what would be started; `machine` is this one."""
        raise NotImplementedError

    def with_task_setup(self, plan: "WorkflowPlan") -> "WorkflowPlan":
        """Return the plan with what the site says of its nodes."""
        return plan

    def submit(
        self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool, as_json: bool
    ) -> int:
        """Start a prepared workflow and follow it to its end, or leave it in the background; return the exit code."""
        raise NotImplementedError

    def settle_again(self, old: "RunDir") -> None:
        """Remove what is left of an earlier start of a workflow that is to start again."""


class OnThisMachine(WorkflowAt):
    """On this machine."""

    is_this_machine = True

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        from torchmuster.workflow.cli.workflow import show_plan

        show_plan(plan, machine, as_json=as_json)

    def submit(
        self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool, as_json: bool
    ) -> int:
        from torchmuster.workflow.cli.workflow import start_workflow

        return start_workflow(run_dir, plan, detach=detach, as_json=as_json)


class InThisJob(OnThisMachine):
    """On the first node of the job around this shell."""

    def check(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        del plan, detach
        job, name, job_id = self.place.job, self.place.name, self.place.job_id
        if self.place.from_here is None:
            raise UsageError(
                f"this is not a node of job {job_id}, and a workflow runs where it is started",
                where=f"job {job_id} of {name}",
                fix=f"start it on {job.nodes[0].name}, or here with --here",
            )


class OnHosts(WorkflowAt):
    """On hosts of ssh."""

    def check(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        from torchmuster.workflow.cli.ssh_submit import refuse_what_hosts_can_not

        refuse_what_hosts_can_not(plan, self.place.site, detach=detach)

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        from torchmuster.workflow.cli.ssh_submit import show_hosts

        del machine
        show_hosts(plan, self.place.site, as_json=as_json)

    def submit(
        self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool, as_json: bool
    ) -> int:
        from torchmuster.workflow.cli.ssh_submit import submit_to_hosts

        del detach  # it was refused
        return submit_to_hosts(run_dir, plan, self.place.site, as_json=as_json)


class AsJobs(WorkflowAt):
    """As jobs of a scheduler, one for each group."""

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        from torchmuster.workflow.cli.job_scripts import show_jobs

        del machine
        show_jobs(plan, self.place.name, as_json=as_json)

    def with_task_setup(self, plan: "WorkflowPlan") -> "WorkflowPlan":
        from torchmuster.launcher.engines.sites import job_of_site, setup_origin

        site = self.place.site
        lines = job_of_site(site).node_lines or ()
        return replace(plan, setup=lines, setup_origin=setup_origin(site))

    def submit(
        self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool, as_json: bool
    ) -> int:
        from torchmuster.workflow.cli.workflow import submit_to_scheduler

        return submit_to_scheduler(run_dir, plan, self.place.site, detach=detach, as_json=as_json)
