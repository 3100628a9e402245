"""The head of a run inside a job: what the job script starts on the first node.

    python .../torchmuster/run/conduct.py RUN_DIR --engine NAME [--way WAY] [--warn SECONDS]

Started by its path, so that no PYTHONPATH of ours reaches the workers.

It is to the run what `muster run` is on one machine: it owns the agents, restarts them, and leaves the result.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from dataclasses import replace

if __package__ in (None, ""):
    _package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(_package))

from torchmuster.engines.allocation import AllocationEngine
from torchmuster.engines.registry import load_dialect
from torchmuster.errors import MusterError, RunDirectoryError, UsageError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.files.terminal import TerminalVoice
from torchmuster.model import codec
from torchmuster.model.job import Allocation, StartWay
from torchmuster.model.text import render_report, report_of_error
from torchmuster.model.verdict import Result, RunState
from torchmuster.run.create import write_owner
from torchmuster.run.record import read_events, read_plan, read_result
from torchmuster.run.supervise import Supervisor


def main(arguments: list[str]) -> int:
    """Conduct the run of a directory to its end."""
    parser = argparse.ArgumentParser(prog="conduct")
    parser.add_argument("run_dir")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--way")
    parser.add_argument("--warn", type=float, default=0.0)
    options = parser.parse_args(arguments)
    try:
        return _conduct(options)
    except MusterError as error:
        sys.stderr.write(render_report(report_of_error(error)))
        return error.exit_code


def _conduct(options: argparse.Namespace) -> int:
    run_dir = RunDir(options.run_dir)
    plan = read_plan(run_dir)
    if plan is None:
        raise RunDirectoryError("the plan of the run can't be read", where=run_dir.plan)
    dialect = load_dialect(options.engine)
    allocation = dialect.allocation(os.environ, read_file)
    if allocation is None:
        fix = f"muster run --on {options.engine} ..."
        raise UsageError(f"this is no job of {options.engine}", where=run_dir.path, fix=fix)
    write_owner(run_dir)
    _set_aside_result(run_dir)
    # Only now the nodes have names; the agents read them from the plan.
    plan = replace(plan, node_names=tuple(node.name for node in allocation.nodes))
    atomic.write_json(run_dir.plan, codec.to_plain(plan))
    way = StartWay(options.way) if options.way else None
    engine = AllocationEngine(plan, run_dir, dialect, allocation, way)
    voice = TerminalVoice()
    voice.start()
    voice.say(f"job {allocation.job_id}: {', '.join(node.name for node in allocation.nodes)}")
    result = own_run(engine, voice, warn_s=options.warn)
    if result.report is not None and result.state is not RunState.SUCCEEDED:
        voice.print(render_report(result.report))
    voice.flush(5.0)
    return result.exit_code


def own_run(engine: AllocationEngine, voice: TerminalVoice, *, warn_s: float) -> Result:
    """Start the agents on the nodes of a job and follow the run to its end."""
    engine.start_all(first_attempt=next_attempt(engine.run_dir))
    warn_at = warn_time(engine.allocation, warn_s)
    supervisor = Supervisor(engine.plan, engine.run_dir, engine, voice, warn_at=warn_at)
    return asyncio.run(supervisor.run())


def warn_time(allocation: Allocation, warn_s: float) -> float | None:
    """Return when to warn of the job's end; None when its end is not known, or nobody asked."""
    if allocation.ends_at is None or warn_s <= 0:
        return None
    return allocation.ends_at - warn_s


def next_attempt(run_dir: RunDir) -> int:
    """Return the number of the next attempt: a requeued job goes on counting."""
    starts = [e for e in read_events(run_dir.events) if e.get("event") == "attempt_started"]
    return max((int(e["attempt"]) + 1 for e in starts), default=0)


def _set_aside_result(run_dir: RunDir) -> None:
    """A job that starts again has a result of its earlier life, which must not look like the end."""
    if read_result(run_dir) is not None:
        with contextlib.suppress(OSError):
            os.replace(run_dir.result, f"{run_dir.result}.{next_attempt(run_dir)}")


def read_file(path: str) -> str:
    """Return a small file's text: the node file of PBS."""
    with open(path) as file:
        return file.read(1 << 20)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
