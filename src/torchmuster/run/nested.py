"""A training task of a workflow: conducts a run as `muster run` does, inside of the task.

    python -m torchmuster.run.nested OPTIONS.json

Its standard streams are the task's log. It keeps its snapshots from one attempt of the task to the next.
"""

import asyncio
import json
import sys
from typing import Any

from torchmuster.doctor.gpus import visible_gpus
from torchmuster.engines.local import LocalEngine
from torchmuster.errors import MusterError, UsageError
from torchmuster.files.terminal import TerminalVoice
from torchmuster.model.text import render_report, report_of_error
from torchmuster.model.verdict import RunState
from torchmuster.run.create import create_run_dir, link_snapshots, new_run_id
from torchmuster.run.supervise import Supervisor
from torchmuster.spec.launch import LaunchOptions, Problems, plan_run


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
    options = LaunchOptions(
        target=given["script"],
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
    run_dir = create_run_dir(plan, given["folder"])
    link_snapshots(run_dir, given["snapshots"])
    engine = LocalEngine(plan, run_dir, tuple(gpus))
    engine.start_all()
    voice = TerminalVoice()
    voice.start()
    result = asyncio.run(Supervisor(plan, run_dir, engine, voice).run())
    if result.report is not None and result.state is not RunState.SUCCEEDED:
        voice.say(f"failed: {result.report.error}")  # the head of the group gives the whole verdict
    voice.flush(5.0)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
