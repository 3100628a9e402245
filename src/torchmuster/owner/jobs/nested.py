"""A training task of a workflow: conducts a run as `muster run` does, inside of the task.

    training-task OPTIONS.json

Started by its path: the node may have torchmuster as a copy beside the run only.

Its standard streams are the task's log. It keeps its snapshots from one attempt of the task to the next.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from typing import Any

from torchmuster.diagnose.facts.gpus import visible_gpus
from torchmuster.engines.allocation import AllocationEngine
from torchmuster.engines.base import Dialect
from torchmuster.engines.local import LocalEngine
from torchmuster.engines.registry import load_dialect
from torchmuster.errors import MusterError, UsageError
from torchmuster.files import atomic
from torchmuster.files.terminal import TerminalVoice
from torchmuster.model.display.text import render_report, report_of_error
from torchmuster.model.job import Allocation
from torchmuster.model.plan import WARN_S, NodeSetup
from torchmuster.model.states import RunState
from torchmuster.owner.beside import BesideEngine, BesideHost, task_hosts
from torchmuster.owner.create import create_run_dir, link_snapshots, new_run_id
from torchmuster.owner.jobs.conduct import own_run, read_file, way_to_others
from torchmuster.owner.supervise import Supervisor
from torchmuster.spec.launch import RunRequest, plan_run
from torchmuster.spec.problems import Problems


def main(arguments: list[str]) -> int:
    """Conduct the run; the exit code is that of its first failure."""
    with open(arguments[0]) as file:
        given = json.load(file)
    try:
        return _conduct(given)
    except MusterError as error:
        sys.stderr.write(render_report(report_of_error(error)))
        return error.exit_code


def _conduct(given: dict[str, Any]) -> int:
    options = RunRequest(
        script=given["script"],
        args=tuple(given["args"]),
        nodes=given["nodes"],
        nproc_per_node=given["nproc_per_node"],
        max_restarts=given["max_restarts"],
        grace=str(given["grace_s"]),
        cwd=given["cwd"],
        tee="0",
    )
    gpus = visible_gpus()
    problems = Problems()
    plan = plan_run(options, new_run_id(given["script"]), gpus, problems)
    if plan is None:
        text = [render_report(report_of_error(error)) for error in problems.found]
        sys.stderr.write("\n".join(text))
        return UsageError.exit_code
    setup = NodeSetup(lines=tuple(given["setup"]), origin=given["setup_origin"])
    plan = replace(plan, node_setup=setup)
    beside = _hosts_beside(given)
    if beside is not None:
        plan = replace(plan, node_names=tuple(host.name for host in beside[1]))
    inside = _own_nodes(given) if beside is None else None
    if inside is not None:
        plan = replace(plan, node_names=tuple(node.name for node in inside[1].nodes))
    run_dir = create_run_dir(plan, given["folder"])
    link_snapshots(run_dir, given["snapshots"])
    voice = TerminalVoice()
    voice.start()
    if inside is not None:
        way = way_to_others(*inside, None)
        if way.sentence is not None:
            voice.say(way.sentence)
        agents = AllocationEngine(plan, run_dir, *inside, way)
        result = own_run(agents, voice, warn_s=WARN_S)
    elif beside is not None:
        agents_beside = BesideEngine(plan, run_dir, hosts=beside[1], broker=beside[0])
        agents_beside.start_all()
        result = asyncio.run(Supervisor(plan, run_dir, agents_beside, voice).run())
    else:
        engine = LocalEngine(plan, run_dir, tuple(gpus))
        engine.start_all()
        result = asyncio.run(Supervisor(plan, run_dir, engine, voice).run())
    if result.report is not None and result.state is not RunState.SUCCEEDED:
        voice.say(f"failed: {result.report.error}")  # the head of the group gives the whole verdict
    voice.flush(5.0)
    return result.exit_code


def _hosts_beside(given: dict[str, Any]) -> tuple[str, tuple[BesideHost, ...]] | None:
    """Return the broker and this task's hosts of ssh; None elsewhere, and on one host."""
    said = atomic.read_json(given["nodes_file"])
    if not isinstance(said, dict) or said["engine"] != "ssh":
        return None
    if len(said["tasks"].get(given["task"], [])) < 2:
        return None
    return task_hosts(said, given["task"], os.environ)


def _own_nodes(given: dict[str, Any]) -> tuple[Dialect, Allocation] | None:
    """Return the nodes of the job that are this task's; None on one machine."""
    said = atomic.read_json(given["nodes_file"])
    if not isinstance(said, dict) or said["engine"] == "ssh":
        return None
    dialect = load_dialect(said["engine"])
    allocation = dialect.allocation(os.environ, read_file)
    names = said["tasks"].get(given["task"], [])
    if allocation is None or len(names) < 2:
        return None
    nodes = tuple(node for node in allocation.nodes if node.name in names)
    return dialect, replace(allocation, nodes=nodes)
