"""Verdicts on muster's own runs: the head saw every end, so its cause outweighs any guess."""

import re
from collections.abc import Collection
from dataclasses import replace

from torchmuster.core.model.events import HangEvent
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Result
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.entry import ENDINGS, Weight
from torchmuster.diagnose.explain.events import JobOutcome, LogFinding, LogLine, LogVerdict
from torchmuster.diagnose.explain.reading.patterns import match
from torchmuster.diagnose.explain.rules.rows import HIGH, MEDIUM
from torchmuster.diagnose.explain.rules.signals import meaning_of
from torchmuster.diagnose.finding import Confidence
from torchmuster.errors import HeadLostError
from torchmuster.launcher.model.run import RunRecord

_MAKES_STORE = re.compile(r"_create_c10d_store|_tcp_rendezvous_handler|_env_rendezvous_handler")
_STACKS = re.compile(r"\bstacks-\d+\.txt:")
_BY_STATE = {
    RunState.PREEMPTED: (
        "preempted",
        "the scheduler took the nodes back, and the run stopped for it",
    ),
    RunState.TIMED_OUT: ("time-limit", "the time limit of the job was reached"),
    RunState.CANCELLED: ("cancelled", "the run was cancelled"),
    RunState.LOST: ("node-failed", "the run's head is gone and left no result"),
}


def with_own_result(
    verdict: LogVerdict,
    result: Result | None,
    record: RunRecord,
    *,
    state: RunState | None = None,
) -> LogVerdict:
    """Return a verdict on logs, corrected by the record of the run's own head.

    Args:
        verdict: From the logs.
        result: `result.json`; None when the run has none.
        record: `events.jsonl`.
        state: The state of the run, if there is no result.
    """
    final_state = result.state if result is not None else state
    if final_state is None or final_state is RunState.UNKNOWN:
        return verdict
    if final_state is RunState.SUCCEEDED:
        return replace(
            verdict,
            found=(),
            outcome=JobOutcome.ENDED_WELL,
            collect=(),
            notes=_notes(verdict, record),
        )
    if not final_state.is_final:
        hung = [moment.text for moment in record.moments if moment.kind == HangEvent.name]
        notes = (*verdict.notes, *(f"the head's last word on a hang: {text}" for text in hung[-1:]))
        sure = tuple(one for one in verdict.found if one.confidence is not Confidence.LOW)
        if sure:  # such as the end of an earlier attempt
            note = f"the run has not ended: it is {final_state.value}"
            return replace(verdict, found=sure, collect=(), notes=(*notes, note))
        return replace(verdict, found=(), outcome=JobOutcome.RUNNING, collect=(), notes=notes)
    own = finding_of(result, final_state)
    if own is None:
        return verdict
    first = _joined(own, verdict)
    # The head saw who went first, and which hang lasted: lost connections and stacks say no more.
    rest = [one for one in verdict.found if one.cause not in (first.cause, "peer-lost")]
    rest = [one for one in rest if not _STACKS.search(one.at or "")]
    return replace(
        verdict,
        found=(first, *rest),
        outcome=JobOutcome.FAILED,
        collect=(),
        notes=_notes(verdict, record),
        num_files=max(verdict.num_files, 1),
    )


def own_finding(result: Result) -> LogFinding | None:
    """Return the head's report on an ended run as a finding."""
    return finding_of(result, result.state)


def finding_of(result: Result | None, state: RunState) -> LogFinding | None:
    """Return the head's report as a finding; None when there is none."""
    report = result.report if result is not None else None
    if result is not None and result.cause is not None and report is not None:
        return LogFinding(
            cause=cause_of_end(result.cause),
            error=report.error,
            confidence=HIGH,
            weight=2 * Weight.SCHEDULER,
            at=report.at,
            because=report.because,
            ruled_out=("the other ranks' errors: the head saw this end first",),
            hint=report.hint,
            more=report.more,
        )
    if state not in _BY_STATE and report is None:
        return None
    cause, sentence = _BY_STATE.get(state, ("exit-code", "the run failed"))
    head_lost = result is not None and result.exit_code == HeadLostError.exit_code
    if head_lost or (result is not None and result.node_was_lost and state is RunState.PREEMPTED):
        cause = "node-failed"
    return LogFinding(
        cause=cause,
        error=report.error if report is not None else sentence,
        confidence=HIGH if report is not None and state in _BY_STATE else MEDIUM,
        weight=2 * Weight.SCHEDULER,
        at=report.at if report is not None else None,
        because=report.because if report is not None else (),
        hint=report.hint if report is not None else None,
        more=report.more if report is not None else (),
    )


def foreign_store(case: Case, result: Result, masters: Collection[str]) -> LogFinding | None:
    """Return the finding that a script connects to another store than the launcher's, or None.

    With torchrun and muster no rank hosts a store: a script that changes the address or the port
    waits until its timeout.
    """
    error = result.cause.error if result.cause is not None else None
    if error is None or not _MAKES_STORE.search(error.traceback):
        return None
    ports = {master.rpartition(":")[2] for master in masters}
    calls = [
        call for call in case.of("store_connect", "store_validate") if call.get("port") not in ports
    ]
    if not calls or not ports:
        return None
    called, own = f"{calls[0].get('host')}:{calls[0].get('port')}", ", ".join(sorted(masters))
    return LogFinding(
        cause="nobody-hosts-the-store",
        error=f"the script calls a store at {called}; the launcher's is at {own}, and no rank hosts another",
        confidence=HIGH,
        weight=2 * Weight.SCHEDULER,
        evidence=(calls[0].line,),
        hint='init_process_group() with its init_method "env://", and leave MASTER_ADDR and MASTER_PORT as they are',
        began=calls[0].line,
    )


def cause_of_end(end: WorkerEnd) -> str:
    """Return the cause word for an end that a head saw."""
    if end.memory_evidence:
        return "out-of-memory"
    if end.kind is EndKind.NODE_LOST:
        return "node-failed"
    if end.kind is EndKind.NOT_STARTED:
        return "launch-failed"
    if end.kind is EndKind.PREEMPTED:
        return "preempted"
    if end.kind is EndKind.SIGNAL and end.signum is not None:
        return meaning_of(end.signum)
    if end.kind is EndKind.HANG:
        # A rank that also waits is in another collective than the others; else it reached none.
        waits = re.match(r"rank \d+ waited in ", end.detail or "")
        return "collectives-differ" if waits else "rank-missing-in-collective"
    return "exception" if end.kind is EndKind.EXCEPTION else "exit-code"


def _joined(own: LogFinding, verdict: LogVerdict) -> LogFinding:
    """Return the head's finding with evidence, and a better cause word, from the logs."""
    same = next((found for found in verdict.found if is_same(found, own)), None)
    if same is None:
        return own
    better = own.cause in ENDINGS and same.weight >= Weight.PROGRAM and same.confidence is HIGH
    theirs = same.hint if better or not own.hint else None
    return replace(
        own,
        cause=same.cause if better else own.cause,
        evidence=same.evidence,
        hint="; ".join(text for text in (theirs, own.hint) if text) or None,
        confirm=same.confirm,
    )


def is_same(found: LogFinding, own: LogFinding) -> bool:
    """Return whether a finding from the logs is about the end that the head names."""
    if found.cause == own.cause:
        return True
    head_words = " ".join((own.error, *own.because))
    return any(_words(line) in head_words for line in found.evidence if _words(line))


def _words(line: LogLine) -> str:
    """Return the text of a line that tells something, as a traceback's last line; else nothing."""
    text = line.text.strip()
    return text if match(text) is not None or ": " in text else ""


def _notes(verdict: LogVerdict, record: RunRecord) -> tuple[str, ...]:
    started = len(record.attempts)
    made = (f"the run made {started} attempts",) if started > 1 else ()
    return (*verdict.notes, *made, *record.slow.values())
