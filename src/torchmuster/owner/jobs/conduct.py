"""The head of a run inside a job: what the job script starts on the first node.

    conduct RUN_DIR --engine NAME [--way WAY] [--warn SECONDS] [--resubmit K]

Started by its path, so that no PYTHONPATH of ours reaches the workers.

It is to the run what `muster run` is on one machine: it owns the agents, restarts them, and leaves the result.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial

from torchmuster.engines.allocation import AllocationEngine
from torchmuster.engines.base import Dialect
from torchmuster.engines.registry import load_dialect
from torchmuster.engines.ways import Way, choose_way, parse_ways
from torchmuster.errors import MusterError, RunDirectoryError, UsageError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.files.terminal import TerminalVoice
from torchmuster.model import codec
from torchmuster.model.display.repeats import shortened
from torchmuster.model.display.text import render_report, report_of_error
from torchmuster.model.job import Allocation
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Result
from torchmuster.owner.create import write_owner
from torchmuster.owner.deadline import Deadline
from torchmuster.owner.jobs.processor import describe_difference, fit_interpreter
from torchmuster.owner.resubmit import (
    Ask,
    Chain,
    ask_quickly,
    find_end,
    parse_way,
    restarts_spent,
)
from torchmuster.owner.supervise import Supervisor
from torchmuster.owner.views.record import read_events, read_plan, read_result


def main(arguments: list[str]) -> int:
    """Conduct the run of a directory to its end."""
    parser = argparse.ArgumentParser(prog="conduct")
    parser.add_argument("run_dir")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--way")
    parser.add_argument("--warn", type=float, default=0.0)
    parser.add_argument("--submitted-from", metavar="PROCESSOR")
    parser.add_argument("--resubmit", type=int, default=0)
    parser.add_argument("--resubmit-with")
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
        raise UsageError(f"this is not a job of {options.engine}", where=run_dir.path, fix=fix)
    chain = Chain(run_dir, dialect, allocation.job_id, options.resubmit)
    chain.way = parse_way(options.resubmit_with)
    nothing_to_do = chain.begin(next_attempt(run_dir))
    if nothing_to_do is not None:
        sys.stderr.write(f"muster: job {allocation.job_id}: {nothing_to_do}\n")
        return 0
    write_owner(run_dir)
    _set_aside_result(run_dir)
    # Only now the nodes have names; the agents read them from the plan.
    plan = replace(plan, node_names=tuple(node.name for node in allocation.nodes))
    plan = fit_interpreter(plan, os.uname().machine)
    atomic.write_json(run_dir.plan, codec.to_plain(plan))
    way = way_to_others(dialect, allocation, options.way)
    engine = AllocationEngine(plan, run_dir, dialect, allocation, way)
    voice = TerminalVoice()
    voice.start()
    link = f", {chain.links.label}" if chain.links.most > 1 else ""
    if way.sentence is not None:
        voice.say(way.sentence)
    voice.say(f"job {allocation.job_id}{link}: {', '.join(n.name for n in allocation.nodes)}")
    node, machine = allocation.nodes[0].name, os.uname().machine
    difference = describe_difference(options.submitted_from, node, machine)
    if difference is not None:
        voice.say(difference)
    deadline = make_deadline(engine, warn_s=options.warn, goes_on=chain.may_go_on)
    result = own_run(engine, voice, deadline)
    return _finish(result, chain, deadline, voice)


def _finish(result: Result, chain: Chain, deadline: Deadline, voice: TerminalVoice) -> int:
    """Continue the run in another job, or say how it ended."""
    # A requeue ends this job in the middle of it. Not ignored: commands would inherit that.
    signal.signal(signal.SIGTERM, lambda *_: None)
    goes_on = chain.go_on(result, time_was_up=deadline.is_up(), say=voice.say)
    if goes_on:
        voice.flush(5.0)
        return result.exit_code
    if result.report is not None and result.state is not RunState.SUCCEEDED:
        from torchmuster.diagnose.explain.end_of_run import explained

        report = explained(result, chain.run_dir) or result.report
        voice.print(render_report(shortened(report, result, voice.shown)))
    voice.flush(5.0)
    return result.exit_code


def make_deadline(engine: AllocationEngine, *, warn_s: float, goes_on: bool = False) -> Deadline:
    """Return what watches the time of the job: its environment says when it ends, or the scheduler."""
    job = engine.allocation
    ask = partial(find_end, engine.dialect, job.job_id, time.time)
    return Deadline(warn_s, ends_at=job.ends_at, ask=ask, goes_on=goes_on)


def own_run(
    engine: AllocationEngine,
    voice: TerminalVoice,
    deadline: Deadline | None = None,
    *,
    warn_s: float = 0.0,
) -> Result:
    """Start the agents on the nodes of a job and follow the run to its end."""
    deadline = deadline or make_deadline(engine, warn_s=warn_s)
    spent = restarts_spent(engine.run_dir, engine.plan.limits.max_restarts)
    engine.start_all(first_attempt=next_attempt(engine.run_dir), restarts_spent=spent)
    deadline.find_out()  # while the agents start
    supervisor = Supervisor(engine.plan, engine.run_dir, engine, voice, deadline=deadline)
    return asyncio.run(supervisor.run())


def note_the_end(dialect: Dialect, job_id: str, ask: Ask = ask_quickly) -> None:
    """Ask when the job has to end and leave it to the agents: PBS and old versions of Slurm set no variable."""
    from torchmuster.diagnose.facts.environment import ALLOCATION_ENDS_AT

    end = find_end(dialect, job_id, time.time, ask)
    if end is not None:
        os.environ[ALLOCATION_ENDS_AT] = str(int(end))


def way_to_others(dialect: Dialect, allocation: Allocation, words: str | None) -> Way:
    """Return how agents come to the job's other nodes; a job of one node needs no way.

    Raises:
        EngineError: None of the ways is there.
    """
    wanted = parse_ways(words)
    return choose_way(dialect, wanted, os.environ) if len(allocation.nodes) > 1 else Way()


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
