"""The program `task`: the agent of a task; its command line is a `TaskOrder`."""

import asyncio
import os
import shlex

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.codec import from_arguments
from torchmuster.core.net.address import read_secret, split_endpoint
from torchmuster.core.node.options import take_environment
from torchmuster.core.node.output import LogVoice
from torchmuster.core.node.setup import make_socket_folder
from torchmuster.workflow.head.group_head import port_candidates
from torchmuster.workflow.head.group_main import end_with_lifeline, read_plan, read_start
from torchmuster.workflow.plan import TaskNetwork, WorkflowPlan
from torchmuster.workflow.task.agent import TaskAgent
from torchmuster.workflow.task.options import NetworkShare, TaskOptions, TaskOrder

_FLUSH_S = 5.0


def main(arguments: list[str]) -> int:
    """Run the agent of a task."""
    order = from_arguments(TaskOrder, arguments)
    if order.environment is not None:
        take_environment(order.environment)
    proc.become_subreaper()
    return asyncio.run(_serve(order))


async def _serve(order: TaskOrder) -> int:
    run_dir = RunDir(order.run_dir)
    plan = read_plan(run_dir)
    group = plan.group(order.group)
    disk = DiskWriter(root=run_dir.path)
    disk.start()
    voice = LogVoice(run_dir.agent_log(order.task), disk)
    folder = make_socket_folder()
    _add_muster_to_path(folder)
    own_name = plugs.find("host_names", "pod")
    agent = TaskAgent(
        TaskOptions(
            plan=plan,
            group=group,
            task=group.task(order.task),
            attempt=order.attempt,
            run_dir=run_dir,
            heads=tuple(map(split_endpoint, order.head)),
            secret=read_secret(run_dir.secret),
            gpus=read_start(run_dir, order.group).gpus.get(order.task),
            network=_read_network(plan, run_dir, order),
            port_candidates=port_candidates(plan, group),
            socket_path=os.path.join(folder, "task.sock"),
            address=order.address,
            host_name=own_name(os.environ) if own_name is not None else None,
        ),
        disk,
        voice,
    )
    running = asyncio.create_task(agent.run())
    end_with_lifeline(order.lifeline_fd, running)
    try:
        return await running
    except asyncio.CancelledError:
        return 7
    finally:
        disk.flush(_FLUSH_S)


def _add_muster_to_path(folder: str) -> None:
    """Append a `muster` with the command `barrier` to PATH, after one of the task's environment."""
    words = shlex.join(proc.node_program("task-muster"))
    script = f'#!/bin/sh\nexec {words} "$@"\n'.encode()
    atomic.replace_file(os.path.join(folder, "muster"), script, mode=0o755)
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), folder))


def _read_network(plan: WorkflowPlan, run_dir: RunDir, order: TaskOrder) -> NetworkShare | None:
    if plan.network is not TaskNetwork.PRIVATE:
        return None
    part = atomic.read_json(run_dir.group(order.group).network)[order.task]
    hosts = part.pop("hosts").encode("utf-8", "surrogateescape")
    resolver = part.pop("resolver")
    return NetworkShare(
        hosts=hosts, resolver=None if resolver is None else resolver.encode(), **part
    )
