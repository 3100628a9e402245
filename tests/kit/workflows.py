"""Plans of workflows, of which a test gives what it is about."""

from torchmuster.workflow.plan import WorkflowPlan


def workflow_plan(*groups, **given):
    """Return the plan of a workflow of these groups."""
    usual = {"run_id": "r", "name": "w", "spec_path": "w.yaml", "python": ("python3",), "cwd": "/"}
    return WorkflowPlan(groups=groups, **{**usual, **given})
