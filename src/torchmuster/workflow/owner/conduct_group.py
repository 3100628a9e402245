"""The program `conduct-group`: the head of a group inside a job, on the job's first node.

    conduct-group --run-dir DIR --group NAME --engine NAME

The job script starts it. It starts an agent for each task on that task's first node, and stops the
group when the scheduler asks for it.
"""

import asyncio
import sys
from dataclasses import replace

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.net.address import bind, own_addresses
from torchmuster.errors import UsageError
from torchmuster.launcher.engines.allocation import own_job
from torchmuster.launcher.model.job import AllocatedNode, Allocation
from torchmuster.workflow.head.group_head import (
    ProcessStarter,
    conduct_group,
    read_plan,
    task_argv,
)
from torchmuster.workflow.jobs import GroupJobArguments, node_tasks
from torchmuster.workflow.plan import GroupNodes, GroupPlan, TaskNode
from torchmuster.workflow.task.setup import TaskOrder


def main(arguments: list[str]) -> int:
    """Conduct a group to its end; the exit code is the group's."""
    proc.become_subreaper()
    return asyncio.run(_conduct(codec.from_arguments(GroupJobArguments, arguments)))


async def _conduct(words: GroupJobArguments) -> int:
    run_dir = RunDir(words.run_dir)
    plan = read_plan(run_dir)
    group = plan.group(words.group)
    job = own_job(words.engine, run_dir.path)
    nodes = nodes_of_tasks(group, job.allocation)
    listening = bind("0.0.0.0", 0)
    port = int(listening.getsockname()[1])
    heads = [(address, port) for address in own_addresses()] or [("127.0.0.1", port)]
    folder = run_dir.group(group.name)
    atomic.write_json(folder.head, {"host": heads[0][0], "port": port}, mode=0o600)
    named = {task: tuple(TaskNode(name=one.name) for one in on) for task, on in nodes.items()}
    noted = GroupNodes(engine=words.engine, tasks=named)
    atomic.write_json(folder.nodes, codec.to_plain(noted))
    # pbsdsh does not pass the job script's variables to other hosts.
    job.leave_environment(folder.environment)
    job = job.with_launcher()
    if job.launcher.sentence is not None:
        sys.stderr.write(f"muster: {job.launcher.sentence}\n")

    def wrap(order: TaskOrder) -> list[str] | None:
        node = nodes[order.task][0]
        if node.name == job.node_names[0]:
            return None
        return job.argv(node, task_argv(replace(order, environment=folder.environment)))

    starter = ProcessStarter(run_dir, group.name, heads, wrap=wrap)
    return await conduct_group(plan, run_dir, group.name, listening, starter, obeys_signals=True)


def nodes_of_tasks(group: GroupPlan, allocation: Allocation) -> dict[str, list[AllocatedNode]]:
    """Return the nodes of each task, in the order in which the job asked for them.

    Raises:
        UsageError: The job has fewer nodes than the group needs.
    """
    wanted = node_tasks(group)
    if len(allocation.nodes) < len(wanted):
        raise UsageError(
            f"the group {group.name} needs {len(wanted)} nodes, the job has {len(allocation.nodes)}",
            where=f"job {allocation.job_id}",
        )
    nodes: dict[str, list[AllocatedNode]] = {}
    for task, node in zip(wanted, allocation.nodes, strict=False):
        nodes.setdefault(task, []).append(node)
    return nodes
