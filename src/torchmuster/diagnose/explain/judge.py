"""From all findings to one verdict: which came first, what follows from it, and whether there was a failure at all."""

import re
from dataclasses import replace

from torchmuster.diagnose.explain import (
    rows_said,
    rules_collective,
    rules_launch,
    rules_network,
    rules_program,
    rules_signals,
    rules_store,
    rules_system,
)
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LineRole, LogFinding, LogLine, LogVerdict
from torchmuster.diagnose.explain.patterns import PROGRESS
from torchmuster.diagnose.explain.rows import Rule, Weight
from torchmuster.diagnose.explain.scan import Log
from torchmuster.diagnose.finding import Confidence

# Each looks at the whole case for one cause and argues it, or says nothing.
RULES: tuple[Rule, ...] = (
    *rows_said.SCHEDULER,
    rows_said.could_not_start,
    rules_launch.launcher_on_too_few_nodes,
    rules_launch.rendezvous_differs,
    rules_launch.ENDPOINT_IGNORED,
    rules_launch.node_ranks,
    rules_launch.never_joined,
    rules_launch.RENDEZVOUS_CLOSED,
    rules_network.port_taken,
    rules_network.loopback_endpoint,
    rules_network.bridge_address,
    rules_network.link_local,
    rules_network.unknown_name,
    rules_network.misspelled_name,
    rules_store.cannot_reach_store,
    *rows_said.SAID,
    rows_said.wrong_provider,
    rows_said.NCCL_WARNING,
    rules_system.system_errors,
    rules_program.exceptions,
    rules_program.exit_codes,
    rules_signals.out_of_memory,
    rules_signals.signals,
    rules_signals.ended_from_outside,
    rules_signals.interrupted,
    rules_collective.stuck_collective,
    rules_collective.WATCHDOG_STUCK,
    rules_collective.ended_early,
    rules_collective.ended_beside,
    rules_collective.only_echoes,
)
COLLECT = (
    "the output and error files of every node, from the first line on",
    "the job script, and the scheduler's own record (sacct -j JOB, qstat -xf JOB)",
    "a run with TORCH_CPP_LOG_LEVEL=INFO LOGLEVEL=INFO NCCL_DEBUG=WARN, or `muster run --debug`",
)
_FAILED_END = re.compile(r"\b(?:error|failed|exception|killed|abort|traceback)", re.IGNORECASE)
_METRIC = re.compile(
    r"\b(?:0|no|zero|without(?: any)?) (?:[\w-]+ ){0,2}?(?:errors?|fail\w*|exceptions?|killed|aborted)\b"
    r"|(?:error|fail|kill|exception|abort)\w*(?: \w+){1,2}\W{0,2}[:=] ?0\b"
    r"|[\w/-]*(?:error|fail|kill|exception|abort)\w*(?: (?:rate|ratio|count)s?)?\W{0,3}[:= ]\s*[\d.]+",
    re.IGNORECASE,
)
# A line that also says how it went on is no end.
_GOES_ON = re.compile(
    r"\bretr(?:y|ies|ying)|falling back|\bignor(?:ed|ing)\b|\bskipp(?:ed|ing)\b|^\W*warn",
    re.IGNORECASE,
)
_ENOUGH_STEPS = 3
_SETTINGS = ("launch_config", "launch_line", "variable")  # they hold from their line on
_OF_A_GOODBYE = re.compile(r"TCPStore\.cpp|socket\.cpp|SocketImpl|to shutdown the rendezvous")
_GOODBYE_LINES = 60  # of c10d's stack below the warning
_LONG_AFTER = 20  # lines; what others still write when somebody has failed is less
# After these nothing goes on.
_HARD_ENDS = (
    *("root_cause_table", "task_exit", "rdzv_timeout", "time_limit", "oom_proof", "node_failed"),
    *(
        "preempted",
        "evicted",
        "pbs_killed",
        "cancelled",
        "final",
        "killed_line",
        "signal_received",
        "bad_arguments",
    ),
)
# Findings that speak of what would fail, not of what did.
_FORETOLD = frozenset({"wrong-provider"})


def judge(case: Case) -> LogVerdict:
    """Return the verdict on a case."""
    record = case.record
    found = [finding for rule in RULES for finding in rule(case)]
    foretold = tuple(finding for finding in found if finding.cause in _FORETOLD)
    found = [finding for finding in found if finding not in foretold]
    notes = tuple(record.notes.lines)
    common = {"num_lines": record.num_lines, "num_files": len(record.logs), "notes": notes}
    if record.num_lines == 0:
        return LogVerdict(found=(), collect=COLLECT, **common)  # type: ignore[arg-type]
    if _ended_well(case, found):
        return LogVerdict(found=(), healthy=True, **common)  # type: ignore[arg-type]
    if not found and foretold:
        found, foretold = list(foretold), ()
    ordered = _order(case, found)
    collect = COLLECT if not ordered or ordered[0].confidence is Confidence.LOW else ()
    return LogVerdict(found=tuple(ordered), next_to_fail=foretold, collect=collect, **common)  # type: ignore[arg-type]


def _ended_well(case: Case, found: list[LogFinding]) -> bool:
    """Say whether the logs show an end without a failure.

    Trouble that training went on after was no failure: a look-up that was tried again, an exception that was caught.
    """
    if case.of(*_HARD_ENDS):
        return False
    if not found:
        return bool(case.of("success")) or not _sounds_failed(case, _last_good(case))
    good, bad = _last_good(case), _last_bad(case, found)
    if any(good.get(path, 0) < order for path, order in bad.items()):
        return False
    # An exception that nobody caught ends its process: only a launcher goes on after it.
    uncaught = {event.line.path for event in case.events if event.get("uncaught")}
    went_on = all(_makes_steps(log, bad) for log in case.record.logs if log.path in uncaught)
    return went_on or bool(case.of("child_failed", "teardown"))


def _makes_steps(log: Log, bad: dict[str, int]) -> bool:
    """Say whether steps went on after the trouble: the ranks wait for each other, so without one they soon stop."""
    after = [line.text for line in log.last if line.order > bad.get(log.path, 0)]
    found = [step for text in after if (step := PROGRESS.regex.search(text)) is not None]
    return len({step.group() for step in found}) >= _ENOUGH_STEPS


def _last_good(case: Case) -> dict[str, int]:
    """Return the last sign of life of each log."""
    found: dict[str, int] = {}
    for log in case.record.logs:
        orders = [e.line.order for e in log.last_progress.values()]
        orders += [e.line.order for e in case.of("success") if e.line.path == log.path]
        if orders:
            found[log.path] = max(orders)
    return found


def _last_bad(case: Case, findings: list[LogFinding]) -> dict[str, int]:
    """Return the last sign of trouble of each log."""
    found: dict[str, int] = {}
    lines = [event.line for event in case.events if event.role in (LineRole.CAUSE, LineRole.ECHO)]
    for line in (*lines, *(finding.began for finding in findings if finding.began is not None)):
        if _is_goodbye(case, line):
            continue
        found[line.path] = max(found.get(line.path, 0), line.order)
    return found


def _is_goodbye(case: Case, line: LogLine) -> bool:
    """Say whether this is torchrun's last call of a rendezvous whose host has left a moment before it, all being well.

    Source: torch 2.13, elastic/rendezvous/dynamic_rendezvous.py: a warning, and the exit code is that of the workers.
    """
    return _OF_A_GOODBYE.search(line.text) is not None and any(
        event.line.path == line.path
        and 0 <= event.line.order - line.order <= _GOODBYE_LINES
        and "failed to shutdown the rendezvous" in event.line.text
        for event in case.of("teardown", "rdzv_connection")
    )


def _sounds_failed(case: Case, good: dict[str, int]) -> bool:
    """Say whether the last lines sound like a failure; not those that a later step has made good."""
    ignored = [(int(e.get("since")), e.line.order) for e in case.of("ignored")]
    return any(
        _FAILED_END.search(_METRIC.sub("", line.text))
        for log in case.record.logs
        for line in log.last[-10:]
        if line.order > good.get(log.path, 0) and not _GOES_ON.search(line.text)
        if not any(first <= line.order <= last for first, last in ignored)
    )


def _order(case: Case, found: list[LogFinding]) -> list[LogFinding]:
    """Return findings, the cause first: what began earlier beats what is only heavier, if times can tell."""
    found = [_lightened(case, _outlived(case, finding), found) for finding in found]
    found.sort(
        key=lambda f: (
            -f.weight,
            f.began.when or 0.0 if f.began else 0.0,
            f.began.order if f.began else 0,
        )
    )
    seen: set[str] = set()
    return [f for f in found if not (f.cause in seen or seen.add(f.cause))]  # type: ignore[func-returns-value]


def _outlived(case: Case, finding: LogFinding) -> LogFinding:
    """Trouble after which its own writer made many more steps ended nothing: it is a guess, if nothing else is there."""
    began = finding.began
    if began is None or finding.weight >= Weight.SCHEDULER:
        return finding
    told = [e for e in case.events if e.line is began]
    ended = any(e.get("uncaught") or e.kind in _SETTINGS for e in told)
    if ended or not _went_on_long(case, began):
        return finding
    because = (*finding.because, "its writer went on for many lines after it")
    # Lines without a label may be several writers': then an exception beats it, a mere echo does not.
    most = Weight.ENVELOPE - 2 if str(began.who) else Weight.PROGRAM - 2
    weight = min(finding.weight, most)
    return replace(finding, weight=weight, confidence=Confidence.LOW, because=because)


def _went_on_long(case: Case, began: LogLine) -> bool:
    for log in case.record.logs:
        if log.path == began.path:
            last = log.last_progress.get(began.who)
            return last is not None and last.line.order > began.order + _LONG_AFTER
    return False


def _lightened(case: Case, finding: LogFinding, found: list[LogFinding]) -> LogFinding:
    """A scheduler's end or a victim's message weighs less where a rank had failed long before."""
    earlier = [
        other
        for other in found
        if other is not finding
        and other.cause not in ("time-limit", "cancelled", "preempted", "peer-lost")
        and (other.weight >= Weight.PROGRAM or _ended_ranks(other, finding))
        and _is_before(other, finding)
    ]
    if finding.cause in ("time-limit", "cancelled", "node-failed", "preempted") and earlier:
        because = (*finding.because, f"before that: {earlier[0].error}")
        return replace(finding, weight=Weight.ENVELOPE, because=because)
    return finding


def _ended_ranks(other: LogFinding, finding: LogFinding) -> bool:
    """Say whether ranks waited in vain, in the same log, before somebody ended what was left of the job."""
    if finding.cause != "cancelled" or other.began is None or finding.began is None:
        return False
    waited = other.cause in (
        "rank-missing-in-collective",
        "collectives-differ",
        "ranks-never-joined",
    )
    return waited and other.began.path == finding.began.path


def _is_before(one: LogFinding, other: LogFinding) -> bool:
    a, b = one.began, other.began
    if a is None or b is None:
        return False
    if a.when is not None and b.when is not None:
        return a.when < b.when - 1.0
    return a.path != b.path or a.order < b.order
