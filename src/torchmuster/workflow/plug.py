"""What the workflow room adds to the tables of plug points: commands, programs, cells and kinds."""

PLUGS = {
    "commands": {
        "submit": ("Run", "Run a workflow file.", "workflow.cli.submit:submit"),
        "validate": ("Workflows", "Check a workflow file.", "workflow.cli.submit:validate"),
        "render": (
            "Workflows",
            "Fill in the template of a workflow file.",
            "workflow.cli.submit:render",
        ),
        "spec": ("Workflows", "Print the workflow file of a run.", "workflow.cli.submit:spec"),
        "barrier": (
            "Workflows",
            "Wait for all tasks of the group.",
            "workflow.cli.barrier:barrier",
        ),
        "dataset": ("Data", "Versioned datasets.", "workflow.cli.data:dataset"),
        "data": ("Data", "Move files to and from URLs.", "workflow.cli.data:data"),
    },
    "programs": {
        "group": "workflow.head.group_head:main",
        "task": "workflow.task.agent:main",
        "container": "workflow.sandbox.container:main",
        "network": "workflow.sandbox.network_hold:main",
        "stage": "workflow.task.staging:main",
        "task-muster": "workflow.task_call:main",
        "conduct-group": "workflow.owner.conduct_group:main",
        "training-task": "workflow.owner.nested:main",
    },
    "messages": {"workflow": "workflow.head.task_messages"},
    "cells": {
        "workflow here": "workflow.cli.places:OnThisMachine",
        "workflow in-job": "workflow.cli.places:InThisJob",
        "workflow hosts": "workflow.cli.places:OnHosts",
        "workflow job": "workflow.cli.places:AsJobs",
        "workflow nowhere": "workflow.cli.places:WorkflowCell",
    },
    "kinds": {
        "workflow view": "workflow.owner.view:view_of_record",
        "workflow result": "workflow.owner.view:result_of_record",
        "workflow commands": "workflow.cli.record",
        "workflow restart": "workflow.cli.record:restart",
        "workflow own": "workflow.owner.workflow:own_in_background",
    },
    "host_orders": {"task": "workflow.task.setup:remote_order"},
    "travels": {
        "workflow/data": "programs of tasks copy data sets and models",
        "workflow/head": "the head of a group runs on a node of it",
        "workflow/jobs.py": "scripts of a workflow's jobs",
        "workflow/owner": "owns groups in jobs and pods",
        "workflow/plan.py": "values that all share",
        "workflow/sandbox": "what a task sees on its node",
        "workflow/task": "runs on the nodes of tasks",
        "workflow/task_call.py": "a task's program calls its agent",
        "workflow/tokens.py": "agents resolve the tokens of a task",
    },
    "stops": {"jobs": "workflow.owner.view:stop_jobs"},
}
