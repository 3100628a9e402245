"""Turns all findings into one verdict: whether the job failed, what came first, what follows."""

import re
from collections.abc import Sequence
from dataclasses import replace

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import ENDINGS, MESSAGE_PREFIX, Weight
from torchmuster.diagnose.explain.events import (
    JobOutcome,
    LineRole,
    LogFinding,
    LogLine,
    LogVerdict,
)
from torchmuster.diagnose.explain.reading.patterns import PROGRESS
from torchmuster.diagnose.explain.reading.scan import Log
from torchmuster.diagnose.explain.rules import collective, launch, node, program, said, signals
from torchmuster.diagnose.explain.rules.rows import Rule, rules_of
from torchmuster.diagnose.finding import Confidence

# How sure the first cause is, compared with the others. A finding starts with the confidence of its
# own evidence. It is lowered here where the message itself has a second reading, or where another
# cause of similar weight has evidence that began earlier. Nothing raises it.


_LIKE = 6  # weights closer than this decide nothing


def weighed(ordered: Sequence[LogFinding]) -> list[LogFinding]:
    """Return the findings; evidence for another cause lowers the confidence of the first."""
    if not ordered:
        return []
    first, *rest = ordered
    shaking = [other for other in rest if is_rival(first, other)]
    if first.confidence is Confidence.HIGH and (first.rivals or shaking):
        first = replace(first, confidence=Confidence.MEDIUM)
    rivals = tuple(dict.fromkeys((*first.rivals, *(other.cause for other in shaking))))
    return [replace(first, rivals=rivals), *rest]


def is_rival(first: LogFinding, other: LogFinding) -> bool:
    """Return whether another finding is a rival: other cause, similar weight, no guess, earlier."""
    if other.cause == first.cause or other.confidence is Confidence.LOW:
        return False
    if first.weight - other.weight > _LIKE or first.began is None or other.began is None:
        return False
    if first.began.when is not None and other.began.when is not None:
        return other.began.when < first.began.when
    return other.began.order < first.began.order


# Where to find the cause when it is not in the given logs.


_EVERYTHING = (
    "the output and error files of every node, from the first line on",
    "the job script, and the scheduler's own record (sacct -j JOB, qstat -xf JOB)",
)
_MORE_LOGGING = (
    "a run with TORCH_CPP_LOG_LEVEL=INFO LOGLEVEL=INFO NCCL_DEBUG=WARN, or `muster run --debug`"
)


def where_to_look(case: Case) -> tuple[str, ...]:
    """Return the places that may show the cause, the likeliest first."""
    louder = () if "nccl-info" in case.surroundings else (_MORE_LOGGING,)
    return (*_near(case), *_EVERYTHING, *louder)


# Hydra's message about a killed rank.
_RAN_AT = re.compile(r"PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)")
_BY_SIGKILL = re.compile(r"EXIT STRING: Killed \(signal 9\)|^=\s+EXIT CODE: (?:9|137)$")


def _last_lines(case: Case) -> list[LogLine]:
    return [line for log in case.record.logs for line in log.last]


def _near(case: Case) -> list[str]:
    found: list[str] = []
    if case.of("root_cause_table", "child_failed"):
        found.append(
            "the lines above torchrun's table, or one file per rank: torchrun --log-dir LOGS --redirects 3 --tee 3"
        )
    elif case.of("task_exit"):
        hosts = sorted({event.get("host") for event in case.of("task_exit")})
        found.append(f"what the tasks on {', '.join(hosts[:4])} wrote before srun's line")
    killed = [line.text for line in _last_lines(case) if _BY_SIGKILL.search(line.text)]
    places = [at for line in _last_lines(case) if (at := _RAN_AT.search(line.text)) is not None]
    if killed and places:
        found.append(
            f"the kernel's log of {places[0]['host']}: dmesg -T | grep -i 'killed process' (process {places[0]['pid']} got SIGKILL,"
            " mostly because memory ran out)"
        )
    if case.silent:
        found.append(f"the log of {', '.join(case.silent[:4])}: there is no word of it")
    if "kubernetes" in case.surroundings:
        found.append(
            "the container's earlier life: kubectl logs POD --previous; kubectl describe pod POD"
        )
    return found


# Each rule searches the case for one cause and yields findings, or nothing.
RULES: tuple[Rule, ...] = (
    *rules_of("scheduler."),
    said.could_not_start,
    launch.launcher_on_too_few_nodes,
    launch.rendezvous_differs,
    *rules_of("launch.endpoint-ignored"),
    launch.node_ranks,
    launch.never_joined,
    *rules_of("launch.rendezvous-closed"),
    launch.port_taken,
    launch.loopback_endpoint,
    launch.bridge_address,
    launch.link_local,
    launch.unknown_name,
    launch.misspelled_name,
    launch.cannot_reach_store,
    launch.named_reason,
    *rules_of("cause."),
    program.messages_of_programs,
    said.wrong_provider,
    said.nccl_warning,
    node.broken_disk,
    node.system_errors,
    node.gpu_memory,
    node.not_finite,
    program.exceptions,
    program.cut_traceback,
    program.exit_codes,
    signals.out_of_memory,
    signals.signals,
    signals.ended_from_outside,
    signals.interrupted,
    collective.stuck_collective,
    *rules_of("collective.watchdog-stuck"),
    collective.ended_early,
    collective.ended_before_peer,
    collective.lost_connections,
)
_ENOUGH_STEPS, _SOME_STEPS = 3, 2
# The last lines of scripts that ended well.
_LAST_WORDS = re.compile(
    r"(?:^|\W)(?:done|finished|bye|goodbye|fertig|terminé|完成|终了|結束|完了)(?:\W{0,3}$|, )|^(?:all )?(?:saved|wrote|results?) .*\.(?:pth?|ckpt|safetensors|json|csv)\W*$",
    re.IGNORECASE,
)
_END_LINES = 10
_FEW_AFTER = 15
_LOUD, _AT_THE_END = 4, 2  # of `said.strength`
_SETTINGS = ("launch_config", "launch_line", "variable")  # they hold from their line on
_OF_A_GOODBYE = re.compile(
    r"TCPStore\.cpp|socket\.cpp|SocketImpl|to shutdown the rendezvous|^Exception raised from|^frame #\d+"
)
_GOODBYE_LINES = 60  # of c10d's stack below the warning
_LONG_AFTER = 20  # lines; after a failure others write less
_LONGEST_WAIT_S = 3600  # more than any default timeout, with what the watchdog adds
_RAISED = re.compile(
    r"^(?:\S+: )?(?:\[\w+\]: )?(?:\w+\.)*(?!Connection)[A-Z]\w*(?:Error|Interrupt)\b"
)
_FINISHED = re.compile(
    r"\btraining (?:is |has |was )?(?:been )?(?:complete|finished|done|ended)|^\W*final \w+ metrics",
    re.IGNORECASE,
)
_PUT_AWAY = re.compile(r"CANCELLED AT (?!.*DUE TO)|receive[sd] a SIGTERM")
# After these no process continues.
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
_NAMES_SOMETHING = re.compile(r"[a-zA-Z].*\d|\d.*[a-zA-Z]|\d\.\d|\w[./@]\w|^/")
_WAITED = re.compile(r"FailedScheduling")  # its place in a list of events tells no time
# A pod's first event, even if the pod was evicted later.
_ASSIGNED = re.compile(r"Successfully assigned")
_POD = re.compile(r"\bpod/([\w.-]+)")
# Causes that keep a job from starting until it is admitted.
_WAITS = frozenset({"no-capacity", "site-limits", "evicted", "impossible-request"})
# Causes that spoil the results although the program continues.
_SPOILS_RESULTS = frozenset({"not-finite"})
# Findings about what would fail, not about what did.
_FUTURE_CAUSES = frozenset({"wrong-provider"})


def judge(case: Case) -> LogVerdict:
    """Return the verdict on a case."""
    record = case.record
    found = [finding for rule in RULES for finding in rule(case)]
    found = [
        finding
        for finding in found
        if not _continued_after(case, finding.began, "resumed")
        and not (finding.cause in _WAITS and _was_admitted(case, finding.began))
        and not _was_recovered(case, finding)
    ]
    foretold = tuple(finding for finding in found if finding.cause in _FUTURE_CAUSES)
    found = [finding for finding in found if finding not in foretold]
    outcome = outcome_of(case, found)
    late = [f"after its end: {f.error}" for f in found if outcome is JobOutcome.ENDED_WELL]
    notes = (*record.notes.lines, *late, *said.slow_notes(case))
    common = {"num_lines": record.num_lines, "num_files": len(record.logs), "notes": notes}
    if outcome in (JobOutcome.ENDED_WELL, JobOutcome.RUNNING):
        return LogVerdict(found=(), outcome=outcome, **common)  # type: ignore[arg-type]
    if not found and foretold:
        found, foretold = list(foretold), ()
    if all(one.cause == "exit-code" and one.confidence is Confidence.LOW for one in found):
        found = list(said.reported(case, _LOUD if found else _AT_THE_END)) or found
    ordered = weighed([_less_sure_far_from_end(case, one) for one in _order(case, found)])
    ordered = [one for one in ordered if not _is_explained(one, ordered[0])]
    if ordered:
        outcome = JobOutcome.FAILED
    collect = where_to_look(case) if not ordered or ordered[0].confidence is Confidence.LOW else ()
    return LogVerdict(
        found=tuple(ordered),
        outcome=outcome,
        next_to_fail=foretold,
        collect=collect,
        **common,  # type: ignore[arg-type]
    )


def _is_explained(finding: LogFinding, first: LogFinding) -> bool:
    """Return whether these are the lost connections to a rank of which the first failure tells."""
    tells = first.cause in ENDINGS or first.confidence is not Confidence.LOW
    is_echo = finding.cause == "peer-lost" and finding.weight <= Weight.ENVELOPE
    return is_echo and tells and finding is not first


def outcome_of(case: Case, found: list[LogFinding]) -> JobOutcome:
    """Return the job's state: healthy only if its end, or steps up to the last line, prove it."""
    if _ended_after_finish(case, found):
        return JobOutcome.ENDED_WELL
    ends = [
        event for event in case.of(*_HARD_ENDS) if not _continued_after(case, event.line, "resumed")
    ]
    if ends or (found and not _overcome(case, found)):
        return JobOutcome.FAILED
    if _sounds_failed(case) or _ends_with_an_echo(case):
        return JobOutcome.FAILED
    if case.of("success") or any(
        _LAST_WORDS.search(log.last[-1].text) for log in case.record.logs if log.last
    ):
        return JobOutcome.ENDED_WELL
    return JobOutcome.RUNNING if _steps_to_the_end(case) else JobOutcome.UNKNOWN


def _ended_after_finish(case: Case, found: list[LogFinding]) -> bool:
    """Return whether the only trouble is that the rest of a finished job was ended."""
    finished = {
        e.line.path: e.line.order for e in case.of("success") if _FINISHED.search(e.line.text)
    }
    began = [one.began for one in found]
    lines = [line for line in began if line is not None]
    lines += [e.line for e in case.events if e.role in (LineRole.CAUSE, LineRole.ECHO)]
    steps = [step.line for log in case.record.logs for step in log.last_progress.values()]
    return (
        bool(found)
        and None not in began
        and all(
            line.order > finished.get(line.path, line.order) and _PUT_AWAY.search(line.text)
            for line in lines
        )
        and all(step.order <= finished.get(step.path, 0) for step in steps)
    )


def _continued_after(case: Case, line: LogLine | None, how: str) -> bool:
    """Return whether a scheduler restarted the job, or let it begin at last, after this line."""
    return line is not None and any(
        event.line.path == line.path and event.line.order > line.order for event in case.of(how)
    )


def _was_admitted(case: Case, line: LogLine | None) -> bool:
    """Return whether a waiting job was admitted; where events name pods, the same pod."""
    if line is None:
        return False
    waited, pod = _WAITED.search(line.text) is not None, _POD.search(line.text)
    return any(
        (waited or (event.line.order > line.order and not _ASSIGNED.search(event.line.text)))
        and event.line.path == line.path
        and (pod is None or pod[1] in event.line.text)
        for event in case.of("admitted")
    )


def _was_recovered(case: Case, finding: LogFinding) -> bool:
    """Return whether a later line shows that this trouble is over, such as a successful retry."""
    began = finding.began
    if began is None or any(
        e.get("type") or e.get("uncaught") for e in case.events if e.line is began
    ):
        return False
    named = _names(began.text)
    return any(
        event.line.path == began.path
        and event.line.order > began.order
        and named & _names(event.line.text)
        for event in case.of("recovered")
    )


def _names(text: str) -> set[str]:
    """Return the words of a line that name something: a host, an address, a path, a file."""
    return {word.strip(".,:;()[]'\"") for word in text.split() if _NAMES_SOMETHING.search(word)}


def _less_sure_far_from_end(case: Case, finding: LogFinding) -> LogFinding:
    """Return a finding, sure only if its line was an end.

    That is an exception, the scheduler's message, or a line near the last. Measured on foreign
    logs: of lines far from the end that name a cause themselves, one in six was no cause.
    """
    began = finding.began
    if finding.confidence is not Confidence.HIGH or began is None or len(case.record.logs) > 1:
        return finding
    if finding.weight >= Weight.PROVED or any(
        e.get("type") for e in case.events if e.line is began
    ):
        return finding
    lines_after = case.record.logs[0].num_lines - began.number
    if lines_after <= _FEW_AFTER or case.of(*_HARD_ENDS):
        return finding
    return replace(finding, confidence=Confidence.MEDIUM)


def _ends_with_an_echo(case: Case) -> bool:
    """Return whether a launcher's last lines report that something else has failed."""
    last = {line.order for log in case.record.logs for line in log.last[-_END_LINES:]}
    good = case.last_good
    return any(
        event.line.order in last and event.line.order > good.get(event.line.path, 0)
        for event in case.events
        if event.role is LineRole.ECHO and event.kind.startswith(MESSAGE_PREFIX)
    )


def _steps_to_the_end(case: Case) -> bool:
    """Return whether a log has steps and little after the last of them, so that the job may run."""
    return any(
        log.last[-1].order - max(step.line.order for step in log.last_progress.values())
        <= _FEW_AFTER
        for log in case.record.logs
        if log.last and log.last_progress
    )


def _overcome(case: Case, found: list[LogFinding]) -> bool:
    """Return whether all trouble was overcome.

    If training continued after it, trouble was no failure: a retried look-up, a caught exception.
    """
    if any(finding.cause in _SPOILS_RESULTS for finding in found):
        return False
    good, bad = case.last_good, _last_bad(case, found)
    if any(good.get(path, 0) < order for path, order in bad.items()):
        return False
    # An uncaught exception ends its process: only a launcher continues after it.
    raised = {event.line.path for event in case.events if event.get("type")}
    uncaught = {event.line.path for event in case.events if event.get("uncaught")}
    succeeded = {e.line.path for e in case.of("success") if e.line.order > bad.get(e.line.path, 0)}
    went_on = all(
        _makes_steps(log, bad, _ENOUGH_STEPS)
        if log.path in uncaught
        else _makes_steps(log, bad, _SOME_STEPS) or log.path in succeeded
        for log in case.record.logs
        if log.path in raised
    )
    return went_on or bool(uncaught and case.of("child_failed", "teardown"))


def _makes_steps(log: Log, bad: dict[str, int], least: int) -> bool:
    """Return whether steps continued after the trouble: without one rank, all soon stop."""
    after = [line.text for line in log.last if line.order > bad.get(log.path, 0)]
    found = [step for text in after if (step := PROGRESS.find(text)) is not None]
    return len({step.group() for step in found}) >= least


def _last_bad(case: Case, findings: list[LogFinding]) -> dict[str, int]:
    """Return the last sign of trouble in each log."""
    found: dict[str, int] = {}
    lines = [event.line for event in case.events if event.role in (LineRole.CAUSE, LineRole.ECHO)]
    for line in (*lines, *(finding.began for finding in findings if finding.began is not None)):
        if _is_goodbye(case, line):
            continue
        found[line.path] = max(found.get(line.path, 0), line.order)
    return found


def _is_goodbye(case: Case, line: LogLine) -> bool:
    """Return whether this is torchrun's harmless warning about a rendezvous host that left first.

    Source: torch 2.13, elastic/rendezvous/dynamic_rendezvous.py: a warning, and the exit code is
    that of the workers.
    """
    return _OF_A_GOODBYE.search(line.text) is not None and any(
        event.line.path == line.path
        and 0 <= event.line.order - line.order <= _GOODBYE_LINES
        and "failed to shutdown the rendezvous" in event.line.text
        for event in case.of("teardown", "rdzv_connection")
    )


def _sounds_failed(case: Case) -> bool:
    """Return whether lines sound like a failure after which no step or success came."""
    ignored = [(int(e.get("since")), e.line.order) for e in case.of("ignored")]
    orders = {line.order for log in case.record.logs for line in log.last[-_END_LINES:]}
    return any(
        said.strength(event) >= (_AT_THE_END if event.line.order in orders else _LOUD)
        or (event.line.order in orders and said.wraps(event))
        for event in said.failures_without_progress(case)
        if not _is_goodbye(case, event.line)
        if not any(first <= event.line.order <= last for first, last in ignored)
    )


def _order(case: Case, found: list[LogFinding]) -> list[LogFinding]:
    """Return findings by weight and time, one for each cause; consequences get less weight."""
    found = [
        _less_weight_after_failure(case, _guess_if_survived(case, finding), found)
        for finding in found
    ]
    found = _causes_of_waits(case, found)
    found.sort(
        key=lambda f: (
            -f.weight,
            f.began.when or 0.0 if f.began else 0.0,
            f.began.order if f.began else 0,
        )
    )
    seen: set[str] = set()
    return [f for f in found if not (f.cause in seen or seen.add(f.cause))]  # type: ignore[func-returns-value]


def _guess_if_survived(case: Case, finding: LogFinding) -> LogFinding:
    """Turn trouble into a guess if its writer continued for long after it."""
    began = finding.began
    if began is None or finding.weight >= Weight.SCHEDULER:
        return finding
    of_line = [e for e in case.events if e.line is began]
    ended = any(e.get("uncaught") or e.kind in _SETTINGS for e in of_line)
    ended = ended or finding.cause in _SPOILS_RESULTS
    if ended or not _went_on_long(case, began):
        return finding
    because = (*finding.because, "its writer went on for many lines after it")
    # Lines without a label may be several writers': then an exception outweighs it, a mere echo
    # does not.
    most = Weight.ENVELOPE - 2 if str(began.who) else Weight.PROGRAM - 2
    weight = min(finding.weight, most)
    return replace(finding, weight=weight, confidence=Confidence.LOW, because=because)


def _went_on_long(case: Case, began: LogLine) -> bool:
    for log in case.record.logs:
        if log.path == began.path:
            last = log.last_progress.get(began.who)
            return last is not None and last.line.order > began.order + _LONG_AFTER
    return False


def _less_weight_after_failure(
    case: Case, finding: LogFinding, found: list[LogFinding]
) -> LogFinding:
    """Lower the weight of a scheduler's end if another failure came before it."""
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


def _causes_of_waits(case: Case, found: list[LogFinding]) -> list[LogFinding]:
    """Let what ended one rank outweigh the timeout in which others waited for that rank."""
    waits = [one for one in found if one.cause == "rank-missing-in-collective" and one.began]
    if not waits:
        return found
    ended = [one for one in found if _ended_before(case, one, waits[0])]
    if not ended:
        return found
    first = min(ended, key=lambda one: one.began.order if one.began else 0)
    because = (*first.because, "no step came after it, and others waited until a timeout")
    weight = max(first.weight, waits[0].weight + 1)
    heavier = replace(first, weight=weight, because=because)
    return [heavier if one is first else one for one in found]


def _ended_before(case: Case, one: LogFinding, wait: LogFinding) -> bool:
    """Return whether a rank raised or was interrupted before a timeout, without a step between."""
    a, b = one.began, wait.began
    if a is None or b is None or a.path != b.path or one.cause == "peer-lost":
        return False
    is_last = case.last_good.get(a.path, 0) < a.order < b.order
    if a.when is not None and b.when is not None and b.when - a.when > _LONGEST_WAIT_S:
        return False
    return is_last and _RAISED.search(a.text) is not None


def _ended_ranks(other: LogFinding, finding: LogFinding) -> bool:
    """Return whether ranks waited in vain, in the same log, before the job was cancelled."""
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
