"""The head of a run inside a job: what the job script starts on the first node.

Started by its path, so that no PYTHONPATH of ours reaches the workers.

It is to the run what `muster run` is on one machine: it owns the agents, restarts them, and leaves the result.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import replace

from torchmuster.engines.allocation import AllocationEngine
from torchmuster.engines.own_job import own_job
from torchmuster.errors import HeadLostError, RunDirectoryError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.files.tail import size_of
from torchmuster.files.terminal import TerminalVoice
from torchmuster.model import codec
from torchmuster.model.display.repeats import shortened
from torchmuster.model.display.text import render_report
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Result
from torchmuster.owner.create import write_owner
from torchmuster.owner.deadline import Deadline
from torchmuster.owner.jobs import succession
from torchmuster.owner.jobs.inside import (
    is_preempted_for_good,
    make_deadline,
    own_run_inside,
)
from torchmuster.owner.jobs.jobs import cancelled_before_start
from torchmuster.owner.jobs.last_word import answer_on, with_last_word
from torchmuster.owner.jobs.processor import describe_difference, fit_interpreter
from torchmuster.owner.jobs.succession import ConductWords
from torchmuster.owner.resubmit import Chain, parse_method
from torchmuster.owner.views.record import next_attempt, read_plan, read_result
from torchmuster.proc import NODE_DOOR

_TRY_S = 600.0  # for a way to continue, where the end of the job is not known


def main(arguments: list[str]) -> int:
    """Conduct the run of a directory to its end."""
    return conduct(codec.from_words(ConductWords, arguments))


def conduct(words: ConductWords) -> int:
    """Conduct the run of a directory to its end."""
    run_dir = RunDir(words.run_dir)
    plan = read_plan(run_dir)
    if plan is None:
        raise RunDirectoryError("the plan of the run can't be read", where=run_dir.plan)
    job = own_job(words.engine, run_dir.path)
    job = job.from_here() or job  # the agent with the head is a process of this node
    if plan.job_id is not None:  # a session that was started in the job may hold some of its nodes
        job = job.with_nodes(job.nodes[: plan.num_places])
    job_id = job.allocation.job_id
    chain = Chain(run_dir, job.dialect, job_id, words.resubmit)
    chain.way = parse_method(words.resubmit_with)
    nothing_to_do = chain.begin(next_attempt(run_dir))
    if nothing_to_do is not None:
        sys.stderr.write(f"muster: job {job_id}: {nothing_to_do}\n")
        if read_result(run_dir) is None:  # it was cancelled before it began
            atomic.write_json(run_dir.result, codec.to_plain(cancelled_before_start(run_dir)))
        return 0
    write_owner(run_dir)
    has_ended = _set_aside_result(run_dir)
    # Only now the nodes have names; the agents read them from the plan.
    plan = replace(plan, node_names=job.node_names)
    plan = fit_interpreter(plan, os.uname().machine)
    atomic.write_json(run_dir.plan, codec.to_plain(plan))
    voice = TerminalVoice()
    voice.start()
    holder = succession.begin(run_dir, plan, job, words, has_ended=has_ended, say=voice.say)
    engine = AllocationEngine(plan, run_dir, job.with_launcher(words.way), holder)
    link = f", {chain.links.label}" if chain.links.most > 1 else ""
    voice.say(f"job {job_id}{link}: {', '.join(job.node_names)}")
    node, machine = job.node_names[0], os.uname().machine
    difference = describe_difference(words.submitted_from, node, machine)
    if difference is not None:
        voice.say(difference)
    deadline = make_deadline(job, warn_s=words.warn, goes_on=chain.may_go_on)
    output = words.output or run_dir.job_log
    since = size_of(output)
    try:
        result = own_run_inside(engine, voice, deadline)
    except HeadLostError:
        return _outlive(run_dir, voice)
    told = with_last_word(
        result, run_dir, job.dialect, output, since, lambda: answer_on(job.dialect, job_id)
    )
    if told is not result:
        atomic.write_json(run_dir.result, codec.to_plain(told))
        if told.state is RunState.PREEMPTED and deadline.goes_on:
            deadline.was_up = deadline.was_up or is_preempted_for_good(job)
    result = told
    return finish(result, chain, deadline, voice)


def _outlive(run_dir: RunDir, voice: TerminalVoice) -> int:
    """Stay until the node that has taken over has ended the run: the job ends with this process."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    result = succession.outlive(run_dir, voice, told)
    voice.flush(5.0)
    return result.exit_code if result is not None else 128 + signal.SIGTERM


def finish(result: Result, chain: Chain, deadline: Deadline, voice: TerminalVoice) -> int:
    """Continue the run in another job, or say how it ended."""
    # A requeue ends this job in the middle of it. Not ignored: commands would inherit that.
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    until = deadline.ends_at or time.time() + _TRY_S

    def pause(seconds: float) -> bool:
        """Wait, also for the signal that ends the job: at the end of its time one more try is worth it."""
        if told.is_set() or (left_s := until - time.time()) <= 0:
            return False
        told.wait(min(seconds, left_s))
        return not told.is_set() or deadline.is_over()

    goes_on = chain.go_on(result, time_was_up=deadline.is_up(), say=voice.say, pause=pause)
    if goes_on:
        voice.flush(5.0)
        return result.exit_code
    if result.report is not None and result.state is not RunState.SUCCEEDED:
        from torchmuster.diagnose.explain.end_of_run import explained

        report = explained(result, chain.run_dir) or result.report
        voice.print(render_report(shortened(report, result, voice.shown)))
    voice.flush(5.0)
    return result.exit_code


def _set_aside_result(run_dir: RunDir) -> bool:
    """Set aside the result of an earlier life of this job, which must not look like the end; say whether there was one."""
    if read_result(run_dir) is None:
        return False
    with contextlib.suppress(OSError):
        os.replace(run_dir.result, f"{run_dir.result}.{next_attempt(run_dir)}")
    return True


if __name__ == "__main__":  # the script of a job that an earlier version has submitted
    os.execv(sys.executable, [sys.executable, NODE_DOOR, "conduct", *sys.argv[1:]])
