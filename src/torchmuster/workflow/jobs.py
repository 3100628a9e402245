"""A workflow as jobs: one job per group, which waits for the groups whose outputs it reads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.codec import to_arguments
from torchmuster.core.model.text import few_of
from torchmuster.core.proc import NODE_ENTRY
from torchmuster.errors import UsageError
from torchmuster.launcher.engines.base import PYTHON, Dialect
from torchmuster.launcher.model.job import JobDependency, JobRequest, NodeChunk
from torchmuster.workflow.plan import GroupPlan, TaskPlan, WorkflowPlan

# exec_timeout excludes the time to fetch inputs before a command and to store outputs after it.
MARGIN_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """The job of one group, with warnings about what its scheduler can't do.

    Attributes:
        node_tasks: The task of each node, in the order of the job's chunks.
    """

    group: str
    job: JobRequest
    node_tasks: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJobArguments:
    """The command line of `conduct-group` in a job script."""

    run_dir: str
    group: str
    engine: str


def plan_jobs(
    plan: WorkflowPlan,
    dialect: Dialect,
    run_dir: RunDir,
    site_job: JobRequest,
    job_ids: Mapping[str, str],
) -> tuple[GroupJob, ...]:
    """Return the jobs of a workflow; each comes after those that it waits for.

    Args:
        plan: The workflow.
        dialect: The scheduler's dialect.
        run_dir: The workflow's run directory.
        site_job: The options that the site sets for every job.
        job_ids: The id of each group's job, or the shell variable that holds it; groups of an
            earlier run need none.
    """
    jobs: list[GroupJob] = []
    for group in _in_order(plan):
        waits_for = (name for name in group.after if name not in plan.reused)
        after = tuple(JobDependency(job_id=job_ids[name]) for name in waits_for)
        job = replace(_request(plan, group, dialect.name, run_dir, site_job), after=after)
        warnings = (*_warnings(plan, group, job, dialect.name), *dialect.unmapped(job))
        nodes = node_tasks(group)
        jobs.append(GroupJob(group=group.name, job=job, node_tasks=nodes, warnings=warnings))
    return tuple(jobs)


def job_variables(plan: WorkflowPlan) -> dict[str, str]:
    """Return the shell variable for the id of each group's job: `JOB_n_nodes` for `n-nodes`."""
    found: dict[str, str] = {}
    for group in plan.groups:
        name = base_name = "JOB_" + re.sub(r"[^A-Za-z0-9_]", "_", group.name)
        number = 2
        while name in found.values():
            name = f"{base_name}_{number}"
            number += 1
        found[group.name] = name
    return found


def _in_order(plan: WorkflowPlan) -> list[GroupPlan]:
    """Return the groups still to run, in file order, but each after the groups that it reads."""
    done = set(plan.reused)
    waiting = [group for group in plan.groups if group.name not in done]
    ordered: list[GroupPlan] = []
    while waiting:
        ready = next((group for group in waiting if done.issuperset(group.after)), None)
        if ready is None:
            names = ", ".join(group.name for group in waiting)
            raise UsageError(f"the groups {names} wait for each other", where="inputs")
        waiting.remove(ready)
        done.add(ready.name)
        ordered.append(ready)
    return ordered


def _request(
    plan: WorkflowPlan, group: GroupPlan, engine: str, run_dir: RunDir, site_job: JobRequest
) -> JobRequest:
    kinds = _nodes_by_kind(group, site_job.chunks[0].extra)
    chunks = tuple(replace(kind, num_nodes=len(names)) for kind, names in kinds.items())
    excluded = dict.fromkeys(name for task in group.tasks for name in task.resources.nodes_excluded)
    num_nodes = sum(chunk.num_nodes for chunk in chunks)
    min_nodes = sum(task.min_nodes for task in group.tasks)
    words = GroupJobArguments(run_dir=run_dir.path, group=group.name, engine=engine)
    limit_s = site_job.time_limit_s
    if group.exec_timeout_s is not None:
        limit_s = group.exec_timeout_s + MARGIN_S
    return replace(
        site_job,
        name=f"{plan.name}-{group.name}",
        chunks=chunks,
        head=(PYTHON, NODE_ENTRY, "conduct-group", *to_arguments(words)),
        about=(
            f"The head of group {group.name}: it starts an agent on each node of this job, waits for all, "
            "runs the tasks, stores outputs; its exit code is the group's."
        ),
        python=plan.python[0] if plan.python else site_job.python,
        log_path=run_dir.group(group.name).job_log,
        min_nodes=None if min_nodes == num_nodes else min_nodes,
        time_limit_s=limit_s,
        nodes_excluded=tuple(excluded),
        package_copy=run_dir.package_copy,
    )


def _kind(task: TaskPlan, extra: tuple[tuple[str, str], ...]) -> NodeChunk:
    workers = (task.training.nproc_per_node if task.training is not None else None) or ""
    return NodeChunk(
        cpus=task.resources.cpu,
        workers=int(workers) if workers.isdecimal() else 1,
        gpus=task.resources.gpu or 0,
        memory_bytes=task.resources.memory_bytes,
        storage_bytes=task.resources.storage_bytes,
        extra=extra,
    )


def _nodes_by_kind(
    group: GroupPlan, extra: tuple[tuple[str, str], ...] = ()
) -> dict[NodeChunk, list[str]]:
    """Return the tasks of the nodes of each kind; the lead's comes first, so it gets the first node."""
    found: dict[NodeChunk, list[str]] = {}
    for task in (group.lead, *(task for task in group.tasks if task is not group.lead)):
        found.setdefault(_kind(task, extra), []).extend([task.name] * task.num_nodes)
    return found


def node_tasks(group: GroupPlan) -> tuple[str, ...]:
    """Return the task of each node, in the order of the job's chunks."""
    return tuple(name for names in _nodes_by_kind(group).values() for name in names)


def _warnings(plan: WorkflowPlan, group: GroupPlan, job: JobRequest, engine: str) -> list[str]:
    """Return a sentence for each key of the file that has no effect on the job."""
    found: list[str] = []
    resources = [task.resources for task in group.tasks]
    platforms = dict.fromkeys(entry.platform for entry in resources if entry.platform)
    if platforms:
        named = ", ".join(f"`{name}`" for name in platforms)
        found.append(f"platform: {named} is not asked for; name a queue, partition or constraint")
    if any(entry.topology for entry in resources):
        found.append(
            f"topology: not asked for; {engine} places the nodes as its site has configured"
        )
    if group.queue_timeout_s is not None:
        limit = f"{group.queue_timeout_s:g} s"
        found.append(f"queue_timeout: {engine} does not end a job that waits longer than {limit}")
    if job.time_limit_s is None:
        found.append("exec_timeout: none given: the time limit is the default of the queue")
    images = dict.fromkeys(task.image for task in group.tasks if task.image)
    if images and plan.container == "none":
        named = few_of(images, 3)
        found.append(f"image: {named} is not used: tasks run in the job's environment")
    if plan.pool:
        found.append(f"pool: `{plan.pool}` is not asked for; name a queue or partition")
    return found
