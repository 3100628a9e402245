"""What a scheduler has written into a job's output when it ended the job: the cause, of which a signal alone tells nothing."""

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torchmuster.engines.base import Dialect
from torchmuster.engines.wait_reasons import LastWord, reasons_of
from torchmuster.files.layout import RunDir
from torchmuster.model import contract
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Report, Result
from torchmuster.owner.jobs.answers import ask_views
from torchmuster.owner.jobs.links import is_cancelled
from torchmuster.owner.resubmit import ask_quickly

_MOST_BYTES = 1 << 20
_STOPPED = (RunState.CANCELLED, RunState.PREEMPTED)


def with_last_word(
    result: Result,
    run_dir: RunDir,
    dialect: Dialect,
    output: str,
    since: int,
    asked: Callable[[], str] = str,
) -> Result:
    """Return the result of a run that was stopped with the scheduler's own reason, where the job's output has one, or its answer.

    Args:
        result: Of the run.
        run_dir: Of the run.
        dialect: Of the scheduler.
        output: The log that the scheduler writes.
        since: Where the output of this job begins in it: a run may have had other jobs.
        asked: Asks the scheduler what it says of the job.
    """
    reasons = reasons_of(dialect)
    if result.state not in _STOPPED or reasons is None or is_cancelled(run_dir):
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


def answer_on(dialect: Dialect, job_id: str) -> str:
    """Return what the scheduler says of a job now, in its own words; empty where it says nothing."""
    view = ask_views(dialect, (job_id,), lambda argv: ask_quickly([*argv])).get(job_id)
    return view.reason or "" if view is not None else ""


def _joined(result: Result, word: LastWord, line: str) -> Result:
    known = result.report.hint if result.report is not None else None
    if word.kind == "node" and result.node_was_lost and result.report is not None:
        because = (*result.report.because, line)  # the head has the node, too
        return replace(result, report=replace(result.report, because=because))
    hint = word.hint or known or f"muster restart {result.run_id}"
    report = Report(error=word.sentence, because=(line,), hint=hint)
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
