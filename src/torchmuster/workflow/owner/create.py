"""Create the run directory of a workflow."""

import os

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, runs_dir
from torchmuster.core.model import codec
from torchmuster.core.owner.create import make_dir
from torchmuster.launcher.owner.origin import note_origin
from torchmuster.workflow.plan import WorkflowPlan


def link_reused_outputs(plan: "WorkflowPlan", run_dir: RunDir) -> None:
    """Link the outputs of reused groups' tasks from the earlier run.

    Raises:
        OSError: A link can't be made.
    """
    for name, folder in plan.reused.items():
        earlier = RunDir(folder)
        for task in plan.group(name).tasks:
            os.makedirs(run_dir.task_folder(task.name), exist_ok=True)
            output = os.path.realpath(earlier.task_output(task.name))
            if os.path.isdir(output) and not os.path.lexists(run_dir.task_output(task.name)):
                os.symlink(output, run_dir.task_output(task.name))


def create_workflow_dir(plan: "WorkflowPlan", source: str, rendered: str) -> RunDir:
    """Make the run directory of a workflow.

    Raises:
        UsageError: The run directory exists already.
        RunDirectoryError: It can't be made or written.
    """

    def fill(run_dir: RunDir) -> None:
        for path, text in ((run_dir.spec, source), (run_dir.rendered, rendered)):
            with open(path, "w") as file:
                file.write(text)
        atomic.write_json(run_dir.workflow, codec.to_plain(plan))
        for task in (task for group in plan.groups for task in group.tasks):
            os.makedirs(run_dir.task_folder(task.name), exist_ok=True)

    run_dir = make_dir(os.path.join(runs_dir(), plan.run_id), fill)
    note_origin(run_dir, None)
    return run_dir
