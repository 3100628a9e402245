"""What a run's first owner in a job leaves for its successor (`docs/succession.md`)."""

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.claims import Claims, Term
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.codec import from_arguments
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.parts import RunDisplay
from torchmuster.core.owner.record import read_result
from torchmuster.errors import HeadLostError, RunDirectoryError
from torchmuster.launcher.engines.allocation import OwnJob
from torchmuster.launcher.engines.base import NodeQuestion
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs.answers import find_node_loss
from torchmuster.launcher.model.job import Allocation
from torchmuster.launcher.model.succession import NodeLostOrder

_POLL_S = 1.0
_CALL_EVERY_S = 5.0
_CALL_LIMIT_S = 3.0
_GONE_S = 180.0  # a lease, the votes, another lease, and a margin
_ENDS_US_S = 60.0  # for the other owner to end the job
_ENDS_ITS_S = 8.0  # for a head to check the claims twice, and end its workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductOptions:
    """The command line of `conduct`, in the script of a job.

    Attributes:
        engine: The scheduler.
        way: The launchers that may be used; None for all.
        warn: How long before the end of the job to warn the workers, in seconds.
        submitted_from: The processor of the submitting machine.
        resubmit: How often the run may be continued in another job.
        resubmit_with: The method for that; None for the best.
        output: The job's output; None for the run's log.
    """

    run_dir: str
    engine: str
    way: str | None = None
    warn: float = 0.0
    submitted_from: str | None = None
    resubmit: int = 0
    resubmit_with: str | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estate:
    """What a run's owner in a job leaves for its successor: its own command line, and the job."""

    words: ConductOptions
    allocation: Allocation

    @property
    def job(self) -> OwnJob:
        """The job."""
        return OwnJob(dialect=load_dialect(self.words.engine), allocation=self.allocation)


def question_of(job: OwnJob) -> NodeQuestion | None:
    """Return the question for a lost node; None where a job ends with its first node."""
    question: NodeQuestion | None = getattr(job.dialect, "lost_node", None)
    return question if question is not None and question.outlives else None


def begin(
    run_dir: RunDir,
    plan: RunPlan,
    job: OwnJob,
    words: ConductOptions,
    *,
    has_ended: bool,
    say: Callable[[str], None],
) -> str:
    """Claim the run for this job and prepare its succession; return the holder, "" for a session.

    If a scheduler considers a machine dead and starts the job elsewhere, the old head may live on
    behind a cut link; it then finds this claim.

    Args:
        run_dir: Directory of the run.
        plan: Plan of the run.
        job: This job.
        words: The conductor's command line.
        has_ended: Whether the previous head left its result; if not, its workers get time to end.
        say: Prints a message to the user.

    Raises:
        RunDirectoryError: Another job claims the same run at this moment.
    """
    if plan.is_session:
        return ""
    with contextlib.suppress(FileExistsError):
        os.mkdir(run_dir.succession, 0o700)
    claims, holder = Claims(run_dir.succession), secrets.token_hex(8)
    if len(job.nodes) > 1 and question_of(job) is not None:
        estate = Estate(words=words, allocation=job.allocation)
        atomic.write_json(claims.estate, codec.to_plain(estate), mode=0o600)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(claims.estate)
    claims.forget_heads()
    before = claims.newest()
    claim = Term(
        number=before.number + 1 if before is not None else 0,
        holder=holder,
        place=0,
        node=job.node_names[0],
        members=(0,),
        next_attempt=before.next_attempt if before is not None else 0,
        restarts_spent=before.restarts_spent if before is not None else 0,
    )
    if not claims.take(claim):
        raise RunDirectoryError("another job begins with this run", where=run_dir.path)
    if before is not None and not has_ended:
        say(f"the head on {before.node} left no result: its workers get {_ENDS_ITS_S:.0f} s to end")
        threading.Event().wait(_ENDS_ITS_S)
    return holder


def read_estate(run_dir: RunDir) -> Estate:
    """Return what the first owner has left.

    Raises:
        RunDirectoryError: It can't be read.
    """
    path = Claims(run_dir.succession).estate
    try:
        plain: Any = atomic.read_json(path)
        return codec.from_plain(Estate, plain)
    except ValueError as error:
        why = "what the first owner has left can't be read"
        raise RunDirectoryError(why, where=path, why=str(error)) from error


def outlive(run_dir: RunDir, display: RunDisplay, stopping: threading.Event) -> Result | None:
    """Wait for the end of a run that another node has taken over: the job ends with its script.

    Args:
        run_dir: Directory of the run.
        display: Shows why.
        stopping: Set by a signal that asks this process to end.

    Returns:
        The result; None if the process was asked to stop before there was one.

    Raises:
        HeadLostError: The new head doesn't answer any more.
    """
    where = Claims(run_dir.succession).head_node()
    display.say(f"{where} has become the head of this run: this process only waits for its end")
    heard_at = call_at = time.monotonic()
    while not stopping.wait(_POLL_S):
        result = read_result(run_dir)
        if result is not None:
            stopping.wait(_ENDS_US_S)
            return result
        now = time.monotonic()
        if now >= call_at:
            call_at = now + _CALL_EVERY_S
            heard_at = now if _answers(run_dir) else heard_at
        if now - heard_at > _GONE_S:
            raise HeadLostError(
                f"{where} had become the head of this run, and does not answer any more",
                where=run_dir.path,
                why=f"nothing listens there since {now - heard_at:.0f} s",
            )
    return None


def _answers(run_dir: RunDir) -> bool:
    found = Claims(run_dir.succession).announced(fresh=True)
    announced = found[1] if found is not None else None
    for word in announced if isinstance(announced, list) else ():
        host, _, port = str(word).rpartition(":")
        with contextlib.suppress(OSError, ValueError):
            socket.create_connection((host.strip("[]"), int(port)), _CALL_LIMIT_S).close()
            return True
    return False


# An agent that has lost its head asks the scheduler whether the head's node is lost.

_LIMIT_S = 3.0


def main(arguments: list[str]) -> int:
    """Ask, and print the answer; return 0 if the node is lost, else 1."""
    asked = from_arguments(NodeLostOrder, arguments)
    estate, node = read_estate(RunDir(asked.run_dir)), asked.node
    question = question_of(estate.job)
    if question is None:
        return 1
    job_id = estate.allocation.job_id
    words = find_node_loss(question, job_id, node, lambda argv: proc.ask(argv, b"", _LIMIT_S))
    if words is None:
        return 1
    sys.stdout.write(f"{estate.words.engine} says that {node} is lost: {words}\n")
    return 0
