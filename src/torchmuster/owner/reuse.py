"""Take over what an earlier run of a workflow has finished."""

import os

from torchmuster.files.layout import RunDir
from torchmuster.model.workflow import WorkflowPlan


def link_reused(plan: WorkflowPlan, run_dir: RunDir) -> None:
    """Let the tasks of reused groups have the outputs of the earlier run.

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
