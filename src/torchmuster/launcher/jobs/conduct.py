"""The head of a run inside a job: the job script starts it on the first node.

It is started by its path, so that workers don't inherit a PYTHONPATH of ours.

It does for the run what `muster run` does on one machine: it owns the agents, restarts them, and
writes the result.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id, size_of
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model import codec, contract
from torchmuster.core.model.links import ResubmitMethod
from torchmuster.core.model.narration import shortened
from torchmuster.core.model.owner_policy import JobTime
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.create import write_owner
from torchmuster.core.owner.parts import Deadline, RunDisplay
from torchmuster.core.owner.record import next_attempt, plan_to_own, read_result
from torchmuster.core.owner.session import EarlyStop
from torchmuster.core.owner.supervise import own_run
from torchmuster.errors import HeadLostError, MusterError
from torchmuster.launcher.engines.allocation import (
    AllocationEngine,
    InheritedEngine,
    OwnJob,
    own_job,
)
from torchmuster.launcher.engines.base import Dialect, PreemptionQuestion
from torchmuster.launcher.engines.wait_reasons import EndReason, reasons_of
from torchmuster.launcher.jobs import jobs, succession
from torchmuster.launcher.jobs.answers import ask_views
from torchmuster.launcher.jobs.succession import ConductOptions, read_estate
from torchmuster.launcher.model.succession import SucceedOrder
from torchmuster.launcher.notify.watcher import notifying_inside
from torchmuster.launcher.owner.resubmit import (
    COMMAND_TIMEOUT_S,
    Ask,
    Chain,
    ask_quickly,
    ask_spared,
    find_end,
    parse_method,
    restarts_spent,
)

# The login node and the compute node may have different processors: report it, and replace an
# interpreter that can't run.

# Bytes 18 and 19 of an ELF file. Source: elf(5), e_machine.
_ELF_MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 243: "riscv64"}
_HEADER_BYTES = 20


def describe_difference(submitted_from: str | None, node: str, machine: str) -> str | None:
    """Return a line for a node whose processor differs from the login node's; else None."""
    if not submitted_from or submitted_from == machine:
        return None
    return (
        f"login node is {submitted_from}, {node} is {machine}: "
        "the job uses Python from its own PATH"
    )


def elf_machine(path: str) -> str | None:
    """Return a program's processor, as in `uname -m`; None for scripts and unreadable files."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError:
        return None
    if len(header) < _HEADER_BYTES or header[:4] != b"\x7fELF":
        return None
    order = "little" if header[5] == 1 else "big"
    number = int.from_bytes(header[18:20], order)  # type: ignore[arg-type]
    return _ELF_MACHINES.get(number, f"processor {number}")


def fit_interpreter(
    plan: RunPlan, machine: str, which: Callable[[str], str | None] = shutil.which
) -> RunPlan:
    """Replace a Python made for another processor by the python3 of this node's PATH."""
    words = plan.program.python
    path = which(words[0]) if words else None
    made_for = elf_machine(os.path.realpath(path)) if path is not None else None
    own = which("python3")
    if made_for is None or made_for == machine or own is None:
        return plan
    return replace(plan, program=replace(plan.program, python=(own, *words[1:])))


# A scheduler that ends a job writes the cause into the job's output; the signal alone doesn't show
# it.


_MOST_BYTES = 1 << 20
_STOPPED = (RunState.CANCELLED, RunState.PREEMPTED)


def with_scheduler_reason(
    result: Result,
    run_dir: RunDir,
    dialect: Dialect,
    output: str,
    since: int,
    asked: Callable[[], str] = str,
) -> Result:
    """Add the scheduler's reason, from the job's output or its answer, to a stopped run's result.

    Args:
        result: Result of the run.
        run_dir: Directory of the run.
        dialect: The scheduler's dialect.
        output: The log that the scheduler writes.
        since: Offset in it where this job's output begins: the run may have had other jobs.
        asked: Asks the scheduler about the job.
    """
    reasons = reasons_of(dialect)
    if result.state not in _STOPPED or reasons is None or jobs.is_cancelled(run_dir):
        return result
    sources: tuple[Callable[[], str], ...] = (partial(_read, output, since), asked)
    for tells in sources:
        text = tells()
        for word in reasons.last_words:
            if found := re.search(f"^{word.pattern}$", text, re.MULTILINE):
                return _joined(result, word, found[0])
    return result


def _read(output: str, since: int) -> str:
    try:
        with open(output, "rb") as log:
            log.seek(since)
            return log.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _joined(result: Result, word: EndReason, line: str) -> Result:
    known = result.report.hint if result.report is not None else None
    if word.kind == "node" and result.node_was_lost and result.report is not None:
        because = (*result.report.because, line)  # the head has reported the node, too
        return replace(result, report=replace(result.report, because=because))
    hint = word.hint or known or f"muster restart {short_id(result.run_id)}"
    more = result.report.more if result.report is not None else ()
    report = Report(error=word.sentence, because=(line,), hint=hint, more=more)
    if word.kind == "limit":
        return replace(result, state=RunState.FAILED, exit_code=word.exit_code, report=report)
    if word.kind == "cancelled":
        code = 128 + signal.SIGTERM
        return replace(result, state=RunState.CANCELLED, exit_code=code, report=report)
    return replace(
        result,
        state=RunState.PREEMPTED,
        exit_code=contract.EX_TEMPFAIL,
        report=report,
        node_was_lost=word.kind == "node",
    )


_TRY_S = 600.0  # for continuing in another job, if the end of this job is not known


def main(arguments: list[str]) -> int:
    """Conduct a run, given the command line, to its end."""
    options = codec.from_arguments(ConductOptions, arguments)
    with notifying_inside(RunDir(options.run_dir)):
        return conduct(options)


def conduct(words: ConductOptions) -> int:
    """Conduct the run in a directory to its end; return the exit code."""
    run_dir = RunDir(words.run_dir)
    plan = plan_to_own(run_dir)
    job = own_job(words.engine, run_dir.path)
    job = job.from_here() or job  # the agent next to the head is a process of this node
    if plan.job_id is not None:  # a session in the job may hold some of its nodes
        job = job.with_nodes(job.nodes[: plan.num_places])
    job_id = job.allocation.job_id
    chain = Chain(run_dir, job.dialect, job_id, words.resubmit)
    chain.way = parse_method(words.resubmit_with)
    if (nothing_to_do := chain.begin(next_attempt(run_dir))) is not None:
        sys.stderr.write(f"muster: job {job_id}: {nothing_to_do}\n")
        if read_result(run_dir) is None:  # the run was cancelled before it began
            atomic.write_json(run_dir.result, codec.to_plain(jobs.cancelled_before_start(run_dir)))
        return 0
    write_owner(run_dir)
    has_ended = _set_aside_result(run_dir)
    # The nodes have names only now; the agents read them from the plan.
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
    if (line := describe_difference(words.submitted_from, node, machine)) is not None:
        voice.say(line)
    deadline = make_deadline(job, warn_s=words.warn, goes_on=chain.has_link_left)
    output = words.output or run_dir.job_log
    since = size_of(output)
    try:
        result = own_run_inside(engine, voice, deadline)
    except HeadLostError:
        return _outlive(run_dir, voice)

    def asked() -> str:
        view = ask_views(job.dialect, (job_id,), lambda argv: ask_quickly([*argv])).get(job_id)
        return view.reason or "" if view is not None else ""

    with_reason = with_scheduler_reason(result, run_dir, job.dialect, output, since, asked)
    if with_reason is not result:
        atomic.write_json(run_dir.result, codec.to_plain(with_reason))
        if with_reason.state is RunState.PREEMPTED and deadline.limit.goes_on:
            deadline.limit.was_up = deadline.limit.was_up or is_preempted_for_good(job)
    return finish(with_reason, chain, deadline, voice)


def _outlive(run_dir: RunDir, voice: TerminalVoice) -> int:
    """Wait until the node that has taken over ends the run: the job ends with this process."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    result = succession.outlive(run_dir, voice, stopping)
    voice.flush(5.0)
    return result.exit_code if result is not None else 128 + signal.SIGTERM


def finish(result: Result, chain: Chain, deadline: Deadline, voice: TerminalVoice) -> int:
    """Continue the run in another job, or report how it ended; return the exit code."""
    # A requeue ends this job right here. SIGTERM is not ignored, because commands would inherit
    # that.
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    until = deadline.limit.ends_at or time.time() + _TRY_S

    def pause(seconds: float) -> bool:
        """Wait, but stop at SIGTERM; return whether another try makes sense, as at a time limit."""
        if stopping.is_set() or (left_s := until - time.time()) <= 0:
            return False
        stopping.wait(min(seconds, left_s))
        return not stopping.is_set() or deadline.is_over()

    goes_on = chain.go_on(result, time_was_up=deadline.is_up(), say=voice.say, pause=pause)
    if not goes_on and result.report is not None and result.state is not RunState.SUCCEEDED:
        explained = plugs.find("ends", "explain")
        report = explained(result, chain.run_dir) if explained is not None else None
        report = report or result.report
        voice.print(render_report(shortened(report, result, voice.shown)))
    voice.flush(5.0)
    return result.exit_code


def _set_aside_result(run_dir: RunDir) -> bool:
    """Move away the result of this job's previous start, if any; return whether there was one."""
    if read_result(run_dir) is None:
        return False
    with contextlib.suppress(OSError):
        os.replace(run_dir.result, f"{run_dir.result}.{next_attempt(run_dir)}")
    return True


# A run on the nodes of a job: its agents, its earlier attempts, the end of its time.

_ENDS_S = 30.0  # more, for a scheduler that is late
_LONGEST_GRACE_S = 3600.0
_TRIES = 3


def own_run_inside(engine: AllocationEngine, display: RunDisplay, deadline: Deadline) -> Result:
    """Start the agents on the nodes of a job and follow the run to its end."""
    if engine.job.launcher.sentence is not None:
        display.say(engine.job.launcher.sentence)
    spent = restarts_spent(engine.run_dir, engine.plan.limits.max_restarts)
    early = EarlyStop()
    engine.start_all(first_attempt=next_attempt(engine.run_dir), restarts_spent=spent)
    deadline.find_out()  # while the agents start
    is_deposed = engine.is_deposed
    result = own_run(engine, display, deadline=deadline, early=early, is_deposed=is_deposed)
    return _outlast_preemption(engine, result, deadline, display.say)


def _outlast_preemption(
    engine: AllocationEngine,
    result: Result,
    deadline: Deadline,
    say: Callable[[str], None],
) -> Result:
    """Keep the job alive while the scheduler preempts it: a job that ends by itself isn't requeued.

    The scheduler's warning looks like a cancel, so the scheduler is asked what it was. For a job
    that is not requeued, `--resubmit` continues the run as at the end of its time.
    """
    # The signal reaches all processes: a worker that died from it may have ended the run first.
    if result.state is RunState.SUCCEEDED or jobs.is_cancelled(engine.run_dir):
        return result
    grace_s = _grace_s(engine.job, ask_quickly)
    if grace_s is None:
        return result
    name = engine.job.dialect.name
    report = Report(
        error=f"{name} preempts the job for another one",
        because=result.report.because if result.report is not None else (),
        hint=f"muster restart {short_id(result.run_id)}, unless {name} starts the job again",
    )
    code = contract.EX_TEMPFAIL
    result = replace(result, state=RunState.PREEMPTED, exit_code=code, report=report)
    atomic.write_json(engine.run_dir.result, codec.to_plain(result))
    if deadline.limit.goes_on and is_preempted_for_good(engine.job):
        say(f"{name} preempts this job, and does not start it again")
        deadline.limit.was_up = True
        return result
    within = f", in at most {grace_s:.0f} s" if grace_s < _LONGEST_GRACE_S else ""
    say(
        f"{name} preempts this job: it stays until {name} ends it{within}, so that it can be started again"
    )
    threading.Event().wait(min(grace_s, _LONGEST_GRACE_S) + _ENDS_S)
    return result


def _question(job: OwnJob) -> PreemptionQuestion | None:
    question: PreemptionQuestion | None = getattr(job.dialect, "preemption", None)
    return question


def _grace_s(job: OwnJob, ask: Ask) -> float | None:
    """Return the grace before the preemption of this job; None if not preempted or unknown."""
    question = _question(job)
    if question is None:
        return None
    return question.grace_s(_answer(question.argv_for(job.allocation.job_id), ask))


def is_preempted_for_good(job: OwnJob) -> bool:
    """Return whether the scheduler preempts this job and does not requeue it."""
    question = _question(job)
    if question is None:
        return False
    asked = question.argv_for(job.allocation.job_id), question.argv_of_rules
    return question.is_the_end(*(_answer(argv, ask_quickly) for argv in asked))


def _answer(argv: Sequence[str], ask: Ask) -> str:
    """Return the output of a scheduler's command; empty if it fails."""
    for _ in range(_TRIES):
        with contextlib.suppress(MusterError):
            answer = ask(list(argv))
            if answer.status == 0:
                return answer.stdout.decode(errors="replace")
    return ""


def make_deadline(job: OwnJob, *, warn_s: float, goes_on: bool = False) -> Deadline:
    """Return the watch of the job's end, which the environment or the scheduler provides."""
    ask = partial(find_end, job.dialect, job.allocation.job_id, time.time)

    def again() -> float | None:
        end = ask(ask=ask_spared)  # the end of a preemption's grace is not a time limit
        return None if end is not None and _grace_s(job, ask_spared) is not None else end

    ends_at = job.allocation.ends_at
    return Deadline(JobTime(warn_s, ends_at, goes_on=goes_on), ask=ask, ask_again=again)


def note_the_end(job: OwnJob, ask: Ask = ask_quickly) -> None:
    """Tell the agents by a variable when the job ends: PBS and old versions of Slurm set none."""
    from torchmuster.launcher.facts.collect import ALLOCATION_ENDS_AT

    if job.allocation.ends_at is not None:
        return
    end = find_end(job.dialect, job.allocation.job_id, time.time, ask)
    if end is not None:
        os.environ[ALLOCATION_ENDS_AT] = str(int(end))


# The owner of a run in a job whose first node was lost; the agent that became the head starts it.
# It does what the owner in the job's script did, and ends the job, since that script can't.


def main_of_successor(arguments: list[str]) -> int:
    """Own the run to its end, then end the job; return the exit code."""
    words = codec.from_arguments(SucceedOrder, arguments)
    with notifying_inside(RunDir(words.run_dir)):
        return succeed(words)


def succeed(words: SucceedOrder) -> int:
    """Own the run to its end, then end the job; return the exit code."""
    run_dir = RunDir(words.run_dir)
    plan = plan_to_own(run_dir)
    proc.die_with_parent(words.head_pid)
    estate = read_estate(run_dir)
    job = estate.job.with_launcher(estate.words.way)
    chain = Chain(run_dir, job.dialect, job.allocation.job_id, estate.words.resubmit)
    chain.way = parse_method(estate.words.resubmit_with)
    chain.links = jobs.read_links(run_dir) or chain.links
    write_owner(run_dir)
    voice = TerminalVoice()
    voice.start()
    voice.say(f"{job.node_names[words.place]} has become the head of this run")
    engine = InheritedEngine(
        plan, run_dir, job, place=words.place, head_pid=words.head_pid, port=words.head_port
    )
    deadline = make_deadline(job, warn_s=estate.words.warn, goes_on=chain.has_link_left)
    deadline.find_out()
    result = read_result(run_dir)
    try:
        if result is None:  # else the previous owner was killed at the end of the run
            result = own_run(engine, voice, deadline=deadline, is_deposed=engine.is_deposed)
    except HeadLostError as error:
        voice.say(error.what)  # yet another node has taken over
        voice.flush(1.0)
        return error.exit_code
    before = len(chain.links.links)
    code = finish(result, chain, deadline, voice)
    requeued = [link.way for link in chain.links.links[before:]] == [ResubmitMethod.REQUEUE]
    if not requeued and not (result.state in jobs.MAY_BE_CONTINUED and _was_taken(job)):
        with contextlib.suppress(MusterError):  # the job then ends at its time limit
            proc.ask(job.dialect.cancel_argv(job.allocation.job_id), b"", COMMAND_TIMEOUT_S)
    return code


def _was_taken(job: OwnJob) -> bool:
    """Return whether the scheduler ended the job, e.g. at a reboot, and may requeue it."""
    job_id = job.allocation.job_id
    jobs.forget_views()
    view = jobs.view_jobs(job.dialect, (job_id,)).get(job_id)
    return view is not None and view.state in jobs.WAITING_STATES
