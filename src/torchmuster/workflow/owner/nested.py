"""The program `training-task`: own the training run inside a task, as `muster run` does.

    training-task START.json

It is started by its path, because the node may have only the copy of torchmuster next to the run.

Its standard streams are the task's log. All attempts of the task share its snapshots.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torchmuster.core import plugs, proc
from torchmuster.core.engines.local import LocalEngine
from torchmuster.core.files.layout import RunDir
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model import codec
from torchmuster.core.model.plan import WARN_S, Limits, Program, RunPlan, ScriptKind
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Result
from torchmuster.core.node.kernel import visible_gpus
from torchmuster.core.node.options import leave_environment
from torchmuster.core.owner.create import create_run_dir, link_snapshots, new_run_id
from torchmuster.core.owner.supervise import own_run
from torchmuster.core.spec.launch import check_script, count_workers
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import UsageError
from torchmuster.launcher.engines.allocation import AllocationEngine, find_own_job
from torchmuster.launcher.engines.schedulers import set_by_schedulers
from torchmuster.launcher.jobs.conduct import make_deadline, own_run_inside
from torchmuster.launcher.net.interfaces import own_endpoints
from torchmuster.launcher.net.remote_messages import StartNode
from torchmuster.launcher.node.remote.proxy import BROKER_VARIABLE, HOST_VARIABLE, proxy_argv
from torchmuster.workflow.plan import PODS_ENGINE, TaskNode, TrainingInput

# Agents of a training task on ssh hosts: the head's here, others through the remote's broker.


@dataclass(kw_only=True)
class SshTaskEngine(LocalEngine):
    """Starts the agents of one run on its task's ssh hosts; the first host is this one.

    Attributes:
        broker: The name of the broker that starts agents on the other hosts.
    """

    hosts: tuple[TaskNode, ...]
    broker: str
    bind_to: ClassVar[str] = "0.0.0.0"
    keeps_agents: ClassVar[bool] = False  # other hosts can't see the address of a new head

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start one agent for every place, the head's first."""
        # A file brings the variables of the task's file and the setup lines to the other hosts.
        leave_environment(self.run_dir.environment, set_by_schedulers())
        super().start_all(first_attempt=first_attempt, restarts_spent=restarts_spent)

    def start_place(self, place: int) -> None:
        """Start an agent on another host, through a local proxy that ends with it."""
        if place >= len(self.hosts):
            return  # the task has no more hosts; the head continues without, or waits
        host = self.hosts[place]
        request = StartNode(
            place=place,
            heads=own_endpoints(self.address[1]),
            run_dir=self.run_dir.path,
            host=host.name,
            gpus=host.gpus,
        )
        self._agents.append((place, proc.start(proxy_argv(self.broker, request))))


def task_hosts(
    nodes: Sequence[TaskNode], environment: Mapping[str, str]
) -> tuple[str, tuple[TaskNode, ...]]:
    """Return the broker and the hosts of a task, this host first.

    Raises:
        UsageError: The variables that a remote sets are missing from `environment`.
    """
    broker, here = environment.get(BROKER_VARIABLE), environment.get(HOST_VARIABLE)
    if broker is None or here is None:
        names = ", ".join(node.name for node in nodes)
        raise UsageError("this is not a host of a workflow over ssh", where=names)
    others = (node for node in nodes[1:] if node.name != here)
    return broker, (TaskNode(name=here, gpus=nodes[0].gpus), *others)


def main(arguments: list[str]) -> int:
    """Own the run to its end; return its exit code."""
    with open(arguments[0]) as file:
        start = codec.from_plain(TrainingInput, json.load(file))
    nodes = start.nodes.tasks.get(start.task, ()) if start.nodes is not None else ()
    job, broker = None, ""
    of_several = start.nodes.engine if start.nodes is not None and len(nodes) > 1 else None
    in_pods = of_several == PODS_ENGINE
    if of_several == "ssh":
        broker, nodes = task_hosts(nodes, os.environ)
    elif of_several is not None and not in_pods and (job := find_own_job(of_several)) is not None:
        own = {node.name for node in nodes}
        job = job.with_nodes(node for node in job.nodes if node.name in own).with_launcher()
    gpus = visible_gpus()
    by_name = bool(broker) or in_pods
    names = tuple(node.name for node in nodes) if by_name else job.node_names if job else ()
    plan = plan_training(start, gpus, names)
    run_dir = create_run_dir(plan, start.folder)
    link_snapshots(run_dir, start.snapshots)
    voice = TerminalVoice()
    voice.start()
    if job is not None:
        agents = AllocationEngine(plan, run_dir, job)
        result = own_run_inside(agents, voice, make_deadline(job, warn_s=WARN_S))
    elif in_pods:
        result = _own_in_pods(start, plan, run_dir, voice)
    else:
        engine = LocalEngine(plan, run_dir, tuple(gpus))
        if broker:
            engine = SshTaskEngine(plan, run_dir, hosts=nodes, broker=broker)
        engine.start_all()
        result = own_run(engine, voice)
    if result.report is not None and result.state is not RunState.SUCCEEDED:
        # The head of the group shows the whole verdict.
        voice.say(f"{result.state.value}: {result.report.error}")
    voice.flush(5.0)
    return result.exit_code


def _own_in_pods(
    start: TrainingInput, plan: RunPlan, run_dir: RunDir, voice: TerminalVoice
) -> Result:
    """Own the run over its task's pods, this one first; each has its own `{{output}}`."""
    make = (f"mkdir -p {shlex.join(start.folders)}",)
    plan = replace(plan, node_setup=replace(plan.node_setup, before=make))
    engine = plugs.find("task_engines", "pods")(plan, run_dir, voice.say, start.folders[0])
    try:
        engine.start_all()
        result = own_run(engine, voice)
        engine.finish()
        localized: Result = engine.localized(result)
        return localized
    finally:
        engine.abandon()


def plan_training(start: TrainingInput, gpus: Sequence[str], names: tuple[str, ...]) -> RunPlan:
    """Return the plan of the run, completed with what only this node knows.

    Args:
        start: The input from the agent of the task.
        gpus: The GPUs of this node, which may simulate all nodes.
        names: The names of the nodes; empty when they are simulated.

    Raises:
        ManyErrors: The script or the number of workers is invalid.
    """
    training, problems = start.training, Problems()
    nodes = training.min_nodes, training.max_nodes
    workers = count_workers(training.nproc_per_node, nodes, gpus, problems, simulated=not names)
    check_script(training.script, start.cwd, problems)
    return RunPlan(
        run_id=new_run_id(training.script),
        program=Program(
            kind=ScriptKind.FILE,
            target=training.script,
            args=training.args,
            python=(sys.executable,),
            cwd=start.cwd,
        ),
        min_nodes=training.min_nodes,
        max_nodes=training.max_nodes,
        workers_per_node=problems.checked(workers),
        limits=Limits(max_restarts=training.max_restarts, grace_s=start.grace_s),
        node_names=names or tuple(f"n{place + 1}" for place in range(training.max_nodes)),
        stdin_rank=None,
        node_setup=start.node_setup,
    )
