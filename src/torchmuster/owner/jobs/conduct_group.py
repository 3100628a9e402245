"""The head of a workflow's group inside a job: what the job script starts on the first node.

    conduct-group --run-dir DIR --group NAME --engine NAME

It starts an agent for each task on that task's first node, and stops the group when the scheduler asks for it.
"""

import argparse
import asyncio
import os
import sys

from torchmuster import proc
from torchmuster.engines.base import Dialect, NodeStart
from torchmuster.engines.registry import load_dialect
from torchmuster.engines.ways import Way
from torchmuster.engines.workflow_jobs import node_tasks
from torchmuster.errors import MusterError, UsageError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model.display.text import render_report, report_of_error
from torchmuster.model.job import AllocatedNode, Allocation
from torchmuster.model.workflow import GroupPlan
from torchmuster.net import listener
from torchmuster.net.address import own_addresses
from torchmuster.owner.jobs.conduct import read_file, way_to_others
from torchmuster.programs.group_main import ProcessStarter, Wrap, conduct_group, read_plan


def main(arguments: list[str]) -> int:
    """Conduct a group to its end; the exit code is the group's."""
    parser = argparse.ArgumentParser(prog="conduct_group")
    for option in ("--run-dir", "--group", "--engine"):
        parser.add_argument(option, required=True)
    options = parser.parse_args(arguments)
    proc.become_subreaper()
    try:
        return asyncio.run(_conduct(options))
    except MusterError as error:
        sys.stderr.write(render_report(report_of_error(error)))
        return error.exit_code


async def _conduct(options: argparse.Namespace) -> int:
    run_dir = RunDir(options.run_dir)
    plan = read_plan(run_dir)
    group = plan.group(options.group)
    dialect = load_dialect(options.engine)
    allocation = dialect.allocation(os.environ, read_file)
    if allocation is None:
        raise UsageError(f"this is not a job of {options.engine}", where=run_dir.path)
    nodes = nodes_of_tasks(group, allocation)
    listening = listener.bind("0.0.0.0", 0)
    port = int(listening.getsockname()[1])
    heads = [(address, port) for address in own_addresses()] or [("127.0.0.1", port)]
    folder = run_dir.group(group.name)
    atomic.write_json(folder.head, {"host": heads[0][0], "port": port}, mode=0o600)
    names = {task: [node.name for node in found] for task, found in nodes.items()}
    atomic.write_json(folder.nodes, {"engine": options.engine, "tasks": names})
    # pbsdsh brings no variable of the job's script to another host.
    atomic.write_json(folder.environment, dict(os.environ), mode=0o600)
    way = way_to_others(dialect, allocation, None)
    if way.sentence is not None:
        sys.stderr.write(f"muster: {way.sentence}\n")
    starter = ProcessStarter(
        run_dir,
        group.name,
        heads,
        wrap=_wrap(dialect, nodes, allocation.nodes[0], folder.environment, way),
    )
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


def _wrap(
    dialect: Dialect,
    nodes: dict[str, list[AllocatedNode]],
    first: AllocatedNode,
    environment: str,
    way: Way,
) -> Wrap:
    def wrap(task: str, argv: list[str]) -> list[str] | None:
        node = nodes[task][0]
        if node.name == first.name:
            return None
        start = NodeStart(
            node=node.name,
            command=(*argv, f"--environment={environment}"),
            slot=node.slot,
            cpus=node.cpus,
            het_group=node.het_group,
            way=way.kind,
        )
        return way.argv(dialect, start)

    return wrap
