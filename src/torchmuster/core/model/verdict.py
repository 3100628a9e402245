"""The verdict on a run: what failed first, on which rank and node, with the evidence.

Pure text and values: `result.json` stores the verdict, `core.cli.messages` prints it.
"""

import enum
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.core.model import contract
from torchmuster.core.model.failure import ECHOES, OVERUSED, EndKind, WorkerEnd, describe, last_step
from torchmuster.core.model.ranks import name_ranks
from torchmuster.core.model.states import RunState

# Whether another attempt can help, and whether a failure equals the last one: by evidence, never by
# a clock. `docs/faults.md` has the table. A program's mistake remains; a failure of its environment
# may pass. The kind of error tells them apart; if training steps are known, they show whether there
# was progress.


class Prospect(enum.Enum):
    """The prospect of another attempt."""

    NONE = "none"  # it would fail in the same way
    DOUBTFUL = "doubtful"  # if it fails likewise without progress, it always will
    OPEN = "open"  # its environment may change


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The identity of a failure; failures with an open prospect have none.

    Attributes:
        what: The exception's type, or the exit code.
        words: Its message, or a worker's last lines, without what differs between ranks and starts.
    """

    kind: EndKind
    what: str
    where: str | None
    words: str


_PERMANENT_ERRORS = frozenset({"SyntaxError", "ImportError", "NameError"})
# OS errors caused by a missing or wrong path: they last until the path is fixed.
_OF_A_PATH = frozenset(
    {
        *("FileNotFoundError", "NotADirectoryError", "IsADirectoryError"),
        *("PermissionError", "FileExistsError"),
    }
)
# A worker has no terminal, and a missing build feature stays missing.
_ALWAYS_FINAL = re.compile(r"EOF when reading a line|doesn't have \w+ built in")
# A limit that a script hits at once, or a truncated file: the next attempt would find it again.
_HITS_A_LIMIT = re.compile(
    r"DefaultCPUAllocator|no space left|disk quota|Ran out of input|collective mismatch",
    re.IGNORECASE,
)
_ENVIRONMENT_ERRORS = frozenset({"OSError", "MemoryError", "EOFError"})
_ENVIRONMENT_NAMES = re.compile(
    r"Timeout|TimedOut|Connect|Network|Socket|HTTP|Unavailable|Throttl|RateLimit|Transient"
    r"|^Dist\w*Error$|OutOfMemory|AcceleratorError|BrokenProcessPool"
)
_ENVIRONMENT_MESSAGES = re.compile(
    r"""
      CUDA\ (driver\ )?error | CUBLAS | cuDNN\ error | CUDNN_STATUS | \bNCCL | HIP\ error
    | out\ of\ memory | can't\ allocate\ memory | cannot\ allocate\ memory | timed\ out
    | too\ many\ open\ files | input/output\ error | stale\ file\ handle
    | resource\ temporarily\ unavailable | DataLoader\ worker\ .*\ killed
    | gloo | c10d | TCPStore | rendezvous | connection | socket | \bpeer\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
# What differs between starts or ranks without showing progress.
_DIFFERS = re.compile(
    r"0x[0-9a-f]+|\bpid\(s\) [\d, ]+|\b(?:pid|process|rank|cuda:|thread-)\W?\d+|\b[0-9a-f]{8,}\b|/tmp/\S+",
    re.IGNORECASE,
)
_SAID_WHY = (EndKind.EXCEPTION, EndKind.HANG)
_MAX_WORDS = 2000
_SHELLS_SIGNAL = 128


def prospect(end: WorkerEnd) -> Prospect:
    """Return the prospect of another attempt after this end."""
    said = _said(end)
    if end.is_final or _ALWAYS_FINAL.search(said):
        return Prospect.NONE
    if _HITS_A_LIMIT.search(said):
        return Prospect.DOUBTFUL
    if end.kind in (EndKind.EXIT_CODE, EndKind.PREEMPTED):
        by_signal = (end.exit_code or 0) > _SHELLS_SIGNAL  # a shell's code for a signal
        return Prospect.OPEN if by_signal else Prospect.DOUBTFUL
    if end.kind is EndKind.NODE_LOST and end.detail == OVERUSED:
        return Prospect.DOUBTFUL
    if end.kind not in _SAID_WHY or end.error is None or end.looks_like_echo:
        return Prospect.OPEN
    error = end.error
    if end.kind is EndKind.HANG:
        return Prospect.OPEN if "TimeoutError" in error.bases else Prospect.DOUBTFUL
    if error.blames_node:
        return Prospect.OPEN  # its node gets no ranks again
    names = {error.type_name.rpartition(".")[2], *error.bases}
    if _ENVIRONMENT_MESSAGES.search(said) or ECHOES.search(said):
        return Prospect.OPEN
    if names & _PERMANENT_ERRORS or "ModuleNotFoundError" in names:
        return Prospect.NONE
    if names & _OF_A_PATH:
        return Prospect.DOUBTFUL
    if names & _ENVIRONMENT_ERRORS or any(map(_ENVIRONMENT_NAMES.search, names)):
        return Prospect.OPEN
    return Prospect.DOUBTFUL


def _said(end: WorkerEnd) -> str:
    """Return the output that tells a failure's prospect; a killed process has none."""
    if end.error is not None:
        return f"{end.error.type_name}: {end.error.message}"
    return "\n".join(end.tail) if end.signum in (None, signal.SIGABRT) else ""


def mark(end: WorkerEnd, *, after_early_end: bool = False) -> Mark | None:
    """Return the identity of a failure that may recur; None if its prospect is open.

    Args:
        end: The end of the failed worker.
        after_early_end: Other ranks had ended with 0, so a connection error is no coincidence.
    """
    if after_early_end and end.looks_like_echo:
        where = end.error.where if end.error is not None else None
        return Mark(kind=end.kind, what="early end", where=where, words="")
    if prospect(end) is Prospect.OPEN:
        return None
    if end.kind is EndKind.HANG and end.error is not None:
        what, words = end.error.type_name, ""  # its message has ranks and seconds
    elif end.kind is EndKind.EXCEPTION and end.error is not None:
        what, words = end.error.type_name, end.error.message
    else:
        what, words = str(end.exit_code), "\n".join(end.tail)
    where = end.error.where if end.error is not None else None
    return Mark(kind=end.kind, what=what, where=where, words=_DIFFERS.sub("", words)[:_MAX_WORDS])


MORE_MEMORY = "ask for more memory"
_IS_ERROR = re.compile(r"\berror\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A message in the parts that all messages of muster have.

    Attributes:
        hint: The cure, and nothing else.
        more: Lines below it, each with its word: `retries: ...`, `log: PATH`.
    """

    error: str
    at: str | None = None
    because: tuple[str, ...] = ()
    hint: str | None = None
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The content of `result.json`."""

    run_id: str
    state: RunState
    exit_code: int
    attempts: int
    restarts_spent: int
    elapsed_s: float
    report: Report | None = None
    cause: WorkerEnd | None = None
    lost_s: float = 0.0
    logs_lost_lines: int = 0
    notes: tuple[str, ...] = ()  # remarks on a success
    node_was_lost: bool = False  # stopped while a node was missing
    trained_step: int | None = None  # last step, by the training library
    saved_step: int | None = None  # step of the snapshot to resume from


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What the head knows in addition to the ends."""

    world_size: int
    attempt: int
    restarts_spent: int
    max_restarts: int
    same_as: int | None  # the earlier attempt that failed likewise, without a step between
    is_final: bool
    early_ranks: tuple[int, ...]
    restart_hint: bool
    log_path: str | None
    dead_end: str | None = None  # why no attempt can follow, whatever restarts are left


def notes_on_success(
    ends: Sequence[WorkerEnd], world_size: int, verify_every: int | None = None
) -> tuple[str, ...]:
    """Return remarks on a successful attempt, one sentence each."""
    died = [end for end in ends if end.signum is not None]
    notes = [_died_leaving(died)] if died else []
    sizes = [end.largest_group for end in ends]
    known = [size for size in sizes if size is not None]
    if world_size > 1 and len(known) == world_size and max(known) < world_size:
        notes.append(_never_met(max(known), world_size))
    if verify_every is not None:
        notes += _never_verified(last_step(ends), verify_every)
    return tuple(notes)


def _never_verified(step: int | None, every: int) -> list[str]:
    if step is None:
        why = f"`--verify-every {every}` is for scripts that call resume() of torchmuster.train"
    elif step < every:
        why = f"the last one was {step}, and `--verify-every {every}` begins with step {every}"
    else:
        return []
    return [f"no step was verified: {why}"]


def _died_leaving(ends: Sequence[WorkerEnd]) -> str:
    signals = "/".join(dict.fromkeys(contract.signal_name(end.signum or 0) for end in ends))
    if len(ends) == 1:
        who = f"rank {ends[0].rank} on {ends[0].node}"
        what = "its interpreter was exiting; its script"
    else:
        who = name_ranks([end.rank for end in ends])
        what = "their interpreters were exiting; their scripts"
    return f"{who} died of {signals} while {what} had ended well, so this is no failure"


def _never_met(largest: int, world_size: int) -> str:
    """Return a remark if workers never formed a process group; not every torch script trains."""
    if largest < 2:
        return f"{world_size} workers never formed a process group: if this was training, each trained alone"
    return (
        f"{world_size} workers never formed one process group, the largest had {largest}:"
        " if this was training, it was not one"
    )


def explain_failure(
    cause: WorkerEnd, ends: Sequence[WorkerEnd], circumstances: Circumstances
) -> Report:
    """Return the report on a run that ended because of `cause`."""
    return Report(
        error=_headline(cause, ends, circumstances),
        at=_location(cause, circumstances),
        because=tuple(_evidence(cause, circumstances) + _consequences(cause, ends)),
        hint=_hint(cause, circumstances),
        more=(*_retries(circumstances), *_log(cause, circumstances)),
    )


def alike(cause: WorkerEnd, ends: Sequence[WorkerEnd]) -> list[int]:
    """Return the ranks that raised the same exception at the same line: they are one failure."""
    ranks = {cause.rank}
    if cause.error is not None and cause.error.where:
        this = (cause.error.type_name, cause.error.where)
        ranks |= {e.rank for e in ends if e.error and (e.error.type_name, e.error.where) == this}
    return sorted(ranks)


def _headline(cause: WorkerEnd, ends: Sequence[WorkerEnd], circumstances: Circumstances) -> str:
    if circumstances.early_ranks and cause.looks_like_echo:
        early = circumstances.early_ranks
        needed = "it" if len(early) == 1 else "them"
        return f"{name_ranks(early)} ended with exit code 0 while rank {cause.rank} still needed {needed}"
    if cause.kind is EndKind.NODE_LOST:
        return describe_loss(cause)
    if cause.kind is EndKind.HANG:
        return describe(cause)
    if cause.kind is EndKind.NOT_STARTED:
        return f"rank {cause.rank} could not be started: {describe(cause)}"
    if cause.kind is EndKind.EXCEPTION:
        return f"{name_ranks(alike(cause, ends))} raised {describe(cause)}"
    if cause.kind is EndKind.SIGNAL:
        killed = " because memory ran out" if cause.memory_evidence else ""
        return f"rank {cause.rank} was ended by {describe(cause)}{killed}"
    last = cause.tail[-1].strip() if cause.tail else ""
    said = f": {last:.160}" if _IS_ERROR.search(last) else ""
    return f"rank {cause.rank} ended with {describe(cause)}{said}"


def describe_loss(cause: WorkerEnd) -> str:
    """Return how a node was lost."""
    if cause.memory_evidence:
        return f"memory ran out on {cause.node}: {describe(cause)}"
    return f"{cause.node} was lost: {describe(cause)}"


def _location(cause: WorkerEnd, circumstances: Circumstances) -> str:
    node = f"{cause.node}, attempt {cause.attempt}"
    if cause.kind is EndKind.NODE_LOST:
        return node
    where = f"rank {cause.rank} of {circumstances.world_size} on {node}"
    own = cause.error.own if cause.error is not None else None
    line = cause.error.where if cause.error is not None else None
    return ", ".join(part for part in (line, own.at if own is not None else None, where) if part)


def _evidence(cause: WorkerEnd, circumstances: Circumstances) -> list[str]:
    lines: list[str] = []
    own = cause.error.own if cause.error is not None else None
    if own is not None:
        lines += own.because
    elif cause.error is not None and cause.error.traceback:
        lines += cause.error.traceback.rstrip().splitlines()
    if cause.memory_evidence:
        lines.append(cause.memory_evidence)
    elif cause.kind is EndKind.SIGNAL and cause.signum == 9:
        lines.append("muster did not send it, and no memory counter of the kernel changed")
    if circumstances.early_ranks and cause.looks_like_echo:
        lines.append("that is the likely cause of the error above: its peer was gone")
    if cause.tail and (cause.error is None or cause.kind is EndKind.EXIT_CODE):
        lines.append("its last lines:")
        lines += [f"  {line}" for line in cause.tail]
    if not lines and own is None and cause.kind not in (EndKind.NODE_LOST, EndKind.NOT_STARTED):
        lines.append("it wrote nothing before it ended")
    return lines


def _consequences(cause: WorkerEnd, ends: Sequence[WorkerEnd]) -> list[str]:
    followers: dict[str, list[int]] = {}
    same = alike(cause, ends)
    for end in ends:
        if end is not cause and end.is_failure and end.rank >= 0 and end.rank not in same:
            followers.setdefault(describe(end), []).append(end.rank)
    return [f"then {name_ranks(ranks)}: {what}" for what, ranks in followers.items()]


def _hint(cause: WorkerEnd, circumstances: Circumstances) -> str | None:
    own = cause.error.own if cause.error is not None else None
    if own is not None and own.hint:
        return own.hint
    if circumstances.early_ranks and cause.looks_like_echo:
        return "let every rank make the same number of steps, or train inside `with model.join():`"
    if cause.memory_evidence:
        return f"lower the batch size or the number of loader workers, or {MORE_MEMORY}"
    if cause.kind is EndKind.HANG:
        return (
            f"the stacks show where rank {cause.rank} stands and what the others wait for; if that"
            " is right for this script: `--hang-timeout 30m`, or `off`"
        )
    if cause.kind is EndKind.SIGNAL and cause.signum == 9:
        return "ask the scheduler or the machine's owner who sends SIGKILL"
    if cause.kind is EndKind.SIGNAL and cause.signum in (4, 6, 7, 8, 11) and not cause.tail:
        return "`--env PYTHONFAULTHANDLER=1` prints where it stood"
    return None


def _retries(circumstances: Circumstances) -> Iterator[str]:
    """Yield why no other attempt followed."""
    if circumstances.dead_end:
        yield f"retries: {circumstances.dead_end}"
    elif circumstances.is_final:
        yield "retries: none, because another attempt would end in the same way"
    elif circumstances.same_as is not None:
        both = both_attempts(circumstances.same_as, circumstances.attempt)
        yield (
            f"retries: no more, because {both} failed in the same place without progress between;"
            " `--restart-policy count` retries anyway"
        )
    elif circumstances.restart_hint and circumstances.max_restarts == 0:
        yield "retries: none; `--max-restarts 3` starts all workers again"
    elif circumstances.restarts_spent >= circumstances.max_restarts > 0:
        number = circumstances.max_restarts
        yield f"retries: {'the one' if number == 1 else f'all {number}'} spent"


def _log(cause: WorkerEnd, circumstances: Circumstances) -> Iterator[str]:
    # A log is created with the first byte: a silent rank has none to name.
    silent = cause.kind in (EndKind.EXIT_CODE, EndKind.SIGNAL) and not cause.tail
    if circumstances.log_path and not silent:
        yield f"log: {circumstances.log_path}"


def explain_preemption(end: WorkerEnd, same_as: int, world_size: int) -> Report:
    """Return the report on a run whose workers only ever preempt."""
    both = both_attempts(same_as, end.attempt)
    return Report(
        error=f"rank {end.rank} left with exit code 75 in {both} in the same way",
        at=f"rank {end.rank} of {world_size} on {end.node}, attempt {end.attempt}",
        because=("code 75 asks to be resumed, but a resumed attempt ended in the same way",),
    )


def explain_refused_start(
    node: str, what: str | None, where: str | None, why: str, hint: str | None
) -> Report:
    """Return the report on a run whose workers could not start on a node; None: default text."""
    usual = "`--python PATH` names the interpreter that has the job's packages"
    return Report(
        error=what or "the workers could not be started",
        at=where or node,
        because=tuple(why.splitlines()),
        hint=hint or (None if what else usual),
    )


def both_attempts(first: int, second: int) -> str:
    """Return a phrase for two attempts that failed alike; there may be others between them."""
    return f"attempts {first} and {second}"


def final_exit_code(cause: WorkerEnd, *, first_cause_code: bool) -> int:
    """Return the exit code of a failed run: the worker's own, or 1 as torchrun does."""
    if not first_cause_code:
        return 1
    code = cause.shell_code
    return code if code not in (0, contract.EX_TEMPFAIL) else 1


# How a group and its tasks ended, and the report on the first failure.


# The origin of a stop and the end of the run, decided once from what the head knows then.


AT_ONCE = signal.SIGRTMIN  # sent to an owner; it counts as two Ctrl-C
# One Ctrl-C may arrive twice, from the terminal and from a wrapper; so may SIGTERM, more slowly.
AGAIN_AFTER_S = 0.5
TERM_AGAIN_AFTER_S = 5.0


class StopCause(enum.Enum):
    """The origin of a stop, the best known first; values complete the sentence `... asked to stop`."""

    USER = "you"
    TIME = "the end of the job's time"
    NODE_LOST = "the loss of a node"
    TERMINAL = "the closed terminal"
    OUTSIDE = "the system"  # unknown: a scheduler, an administrator, `kill`


_WHY_CANCELLED = {
    StopCause.USER: "you cancelled it",
    StopCause.TERMINAL: "the terminal was closed",
}
_STAY = "in tmux or screen a run outlives its terminal; `muster run --detach` does, too, if not over ssh"


def cause_of_stop(
    signum: int, *, cancelled: bool = False, time_is_over: bool = False, node_is_lost: bool = False
) -> StopCause:
    """Return the origin of a stop.

    Args:
        signum: The signal received.
        cancelled: `muster cancel` has left its note: its signal comes from the scheduler like any
            other.
        time_is_over: The announced end of the job has come.
        node_is_lost: A node of the job is missing; schedulers end jobs for that.
    """
    if cancelled or signum == signal.SIGINT:
        return StopCause.USER
    if time_is_over:
        return StopCause.TIME
    if node_is_lost and signum == signal.SIGTERM:
        return StopCause.NODE_LOST
    return StopCause.TERMINAL if signum == signal.SIGHUP else StopCause.OUTSIDE


def better_cause(known: StopCause, new: StopCause) -> StopCause:
    """Return the better known of two origins of a stop: the owner knows more than agents."""
    return min(known, new, key=list(StopCause).index)


def end_by_stop(
    cause: StopCause, signum: int, again: str, *, saved: bool, lost: Mapping[str, str]
) -> tuple[RunState, int, Report]:
    """Return the state, exit code and report of a stopped run.

    Args:
        cause: The origin of the stop.
        signum: The signal that the workers got.
        again: How to start the run again.
        saved: Workers reported that they can be resumed, or another job continues.
        lost: Why each missing node was lost.
    """
    name = contract.signal_name(signum)
    if cause is StopCause.NODE_LOST:
        error = f"{', '.join(lost) or 'a node'} was lost, and the job was stopped with {name} then"
        because = tuple(f"{node}: {why}" for node, why in lost.items())
        report = Report(error=error, because=because, hint=again)
        return RunState.PREEMPTED, contract.EX_TEMPFAIL, report
    # A shell loop must not rerun what a user has ended.
    by_hand = cause in _WHY_CANCELLED or signum in (signal.SIGINT, signal.SIGHUP)
    if saved and not by_hand:
        error = "the run was preempted and can be resumed"
        asked = f"{cause.value} asked to stop with {name}"
        by_itself = "; --resubmit N goes on by itself" if cause is StopCause.TIME else ""
        report = Report(error=error, because=(asked,), hint=again + by_itself)
        return RunState.PREEMPTED, contract.EX_TEMPFAIL, report
    if cause is StopCause.TIME:
        error = f"the time limit of the job was reached: the run was stopped with {name}"
        hint = f"more --time, or --resubmit to continue in another job; {again} resumes from the last save"
        return RunState.TIMED_OUT, 128 + signum, Report(error=error, hint=hint)
    asked = _WHY_CANCELLED.get(cause, f"{cause.value} asked for it")
    hints = [f"{again} continues from the last save"] * saved
    hints += [_STAY] * (cause is StopCause.TERMINAL)
    error = f"the run was stopped with {name}"
    report = Report(error=error, because=(asked,), hint="; ".join(hints) or None)
    return RunState.CANCELLED, 128 + signum, report


def not_replaced(report: Report, again: str, lost: Mapping[str, str]) -> Report:
    """Return the report on a run that lost nodes, from the report that no replacement came."""
    error = f"{', '.join(lost)} was lost, and no node came in its place"
    because = (*(f"{node}: {why}" for node, why in lost.items()), report.error)
    return Report(error=error, because=because, hint=again)
