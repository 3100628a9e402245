"""Support for `muster doctor`: puts the test job in place and reads the results of its run."""

import glob
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, muster_home
from torchmuster.core.model import codec
from torchmuster.core.model.events import AgentJoinedEvent, Stamped
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import name_alone, report_of_error
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.create import nearest_folder
from torchmuster.core.owner.record import read_events, read_result
from torchmuster.diagnose.doctor import show
from torchmuster.diagnose.doctor.checks import TEXTS
from torchmuster.diagnose.doctor.compare import compare, exit_code
from torchmuster.diagnose.doctor.rules_gpu import cause_of_call
from torchmuster.diagnose.doctor.show import NodeView, Situation
from torchmuster.diagnose.finding import Finding, Level, worst_first
from torchmuster.diagnose.plan.fit import RingFit, fit_ring, read_timings
from torchmuster.errors import MusterError
from torchmuster.launcher.facts.collect import FactsRequest, collect, own_torch
from torchmuster.launcher.model.events import PreflightEvent
from torchmuster.launcher.model.job import JobState

JOB_END_LIMIT_S = 60.0
_JOB_POLL_S = 0.5
JOB_FILE = "tiny_job.py"
_GOOD_FIT = 0.9
_MAX_LINE = 1 << 20
_CALL = re.compile(r"waiting for the head at (?P<head>\S+) \((?P<why>[^)\n]*)\)")
# Events of a run, and the name of the time since the previous one.
_STEPS = (
    ("run_started", ""),
    ("agent_joined", "agents"),
    ("preflight", "nodes"),
    ("workers_started", "workers"),
    ("run_ended", "job"),
)
_LAST_COUNTS = ("agent_joined", "run_ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results that `muster doctor` shows.

    Attributes:
        findings: Worst first.
        nodes: A row for each node (`show.node_row`).
        pairs: Source, target, why not, microseconds, MB/s.
        job: What the test job printed; None when it was not run or printed no result.
        could_tell: Whether all checks ended, or a certain failure made the rest pointless.
        seconds: How long each part took (`phases`), in the order in which they happened.
        traceback: The traceback of a failed test job, line by line.
    """

    findings: tuple[Finding, ...]
    nodes: tuple[dict[str, Any], ...] = ()
    pairs: tuple[Sequence[Any], ...] = ()
    job: dict[str, Any] | None = None
    could_tell: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    traceback: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 without problems, 1 for warnings, 2 for failures, 3 for an incomplete check."""
        return exit_code(self.findings, could_tell=self.could_tell)


def prepare_job() -> str:
    """Write the test job to its own folder below MUSTER_HOME and return the folder.

    Hosts that do not share the folder get a copy of it, as with any code.

    Raises:
        OSError: The folder can't be written.
    """
    folder = os.path.join(muster_home(), "doctor")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    from torchmuster.diagnose import plan

    source = os.path.join(os.path.dirname(os.path.abspath(plan.__file__)), JOB_FILE)
    with open(source, encoding="utf-8") as file:
        _keep(os.path.join(folder, JOB_FILE), file.read())
    return folder


def _keep(path: str, text: str) -> None:
    """Write a file unless it already has this text: another doctor may be running it."""
    try:
        with open(path, encoding="utf-8") as file:
            if file.read() == text:
                return
    except OSError:
        pass
    atomic.replace_file(path, text.encode())


def check_this_machine(script: str | None) -> Outcome:
    """Return the findings about this machine, without a run."""
    order = FactsRequest(
        is_long=True,
        environment=os.environ,
        run_dir=nearest_folder(muster_home()),
        script=os.path.abspath(script) if script else None,
    )
    facts = collect(order)
    node = NodeView(name="this machine", facts=replace(facts, torch=own_torch()), machine="here")
    situation = Situation(nodes=(node,), is_long=True, script_is_program=False)
    findings = compare(situation)
    return Outcome(findings=tuple(findings), nodes=(show.node_row(node),))


def read_outcome(run_dir: RunDir, *, has_job: bool) -> Outcome:
    """Return the results of a run with the long preflight."""
    events = list(read_events(run_dir.events))
    event = next((one.event for one in events if isinstance(one.event, PreflightEvent)), None)
    result = read_result(run_dir)
    if event is None:
        joined = (one.event for one in events)
        came = {name_alone(one.node) for one in joined if isinstance(one, AgentJoinedEvent)}
        found = _failed_calls(run_dir, came, result) or _no_preflight_finding(result)
        return Outcome(findings=tuple(found), could_tell=False)
    findings = [codec.from_plain(Finding, one) for one in event.findings]
    ended_early = any(finding.is_certain for finding in findings)
    job = _read_job(run_dir) if has_job and not ended_early else None
    if has_job and not ended_early:
        findings += _judge_job(job, result)
    return Outcome(
        findings=tuple(worst_first(findings)),
        nodes=event.nodes,
        pairs=event.pairs,
        job=job,
        could_tell=ended_early or _ended_well(result),
        seconds={"looked": event.took_s, **phases(events)},
        traceback=_traceback(result) if has_job and not ended_early else (),
    )


def phases(events: Sequence[Stamped]) -> dict[str, float]:
    """Return how long the parts of a check took, in seconds.

    The parts are agents, facts and pairs, start of workers, and test job. The client's time before
    and after the run is not included.
    """
    at: dict[str, float] = {}
    for one in events:
        if (name := one.event.name) not in at or name in _LAST_COUNTS:
            at[name] = one.at
    pairs = itertools.pairwise(_STEPS)
    return {
        word: round(at[end] - at[begin], 3)
        for (begin, _), (end, word) in pairs
        if begin in at and end in at
    }


def _ended_well(result: Result | None) -> bool:
    return result is not None and result.state is RunState.SUCCEEDED


def _failed_calls(run_dir: RunDir, came: set[str], result: Result | None) -> list[Finding]:
    """Return one finding for each reason why agents could not reach the head."""
    seen: dict[tuple[str, str], list[str]] = {}
    folder = os.path.dirname(run_dir.agent_log("n"))
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.log"))):
        node = os.path.basename(path).removesuffix(".log")
        match = _last_call(path) if node not in came else None
        if match is not None:
            seen.setdefault((match["head"], match["why"]), []).append(node)
    because = [result.report.error] if result is not None and result.report is not None else []
    return [
        replace(
            TEXTS["head-not-reached"].finding(nodes, head=head, why=why, because=because),
            cause=cause_of_call((why,)),
        )
        for (head, why), nodes in seen.items()
    ]


def _last_call(path: str) -> re.Match[str] | None:
    """Return the last failed call to the head in an agent's log; None if the agent never waited."""
    try:
        with open(path, errors="replace") as file:
            found = list(_CALL.finditer(file.read(_MAX_LINE)))
    except OSError:
        return None
    return found[-1] if found else None


def _no_preflight_finding(result: Result | None) -> list[Finding]:
    report = result.report if result is not None else None
    if report is None:
        what = "the run ended before the nodes were looked at"
        report = Report(error=what, hint="muster logs RUN, muster explain RUN")
    return [_from_report(report, "not-started")]


def outcome_of_errors(errors: Sequence[MusterError]) -> Outcome:
    """Return an outcome for errors that prevented any check from starting."""
    reports = [report_of_error(error) for error in errors]
    found = tuple(_from_report(report, "not-started") for report in reports)
    return Outcome(findings=found, could_tell=False)


def _from_report(report: Report, cause: str) -> Finding:
    begins = _where_traceback_begins(report)
    return Finding(
        level=Level.FAILURE,
        cause=cause,
        error=report.error,
        at=report.at,
        because=report.because[:begins][-8:],
        hint=report.hint,
        more=report.more,
        weight=98,
    )


def _where_traceback_begins(report: Report) -> int:
    begins = (i for i, line in enumerate(report.because) if line.lstrip().startswith("Traceback ("))
    return next(begins, len(report.because))


def _traceback(result: Result | None) -> tuple[str, ...]:
    """Return the traceback of a failed job: it is long, so it is shown below all findings."""
    if result is None or result.report is None or _ended_well(result):
        return ()
    return result.report.because[_where_traceback_begins(result.report) :]


def _read_job(run_dir: RunDir) -> dict[str, Any] | None:
    try:
        with open(run_dir.rank_log(0, 0), errors="replace") as file:
            lines = [line for line in file.read(_MAX_LINE).splitlines() if line.startswith("{")]
        found = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _judge_job(job: dict[str, Any] | None, result: Result | None) -> list[Finding]:
    if result is not None and result.report is not None and not _ended_well(result):
        return [_from_report(result.report, "tiny-job-failed")]
    if job is None:
        return [TEXTS["job-said-nothing"].finding([])]
    found = []
    if not job.get("right", False):
        found.append(TEXTS["wrong-sums"].finding([]))
    fit = fit_of(job)
    # On one machine the ranks share processors: scattered times prove nothing.
    if fit is None or len(job.get("ranks_per_host", ())) < 2:
        return found
    if fit.r_squared < _GOOD_FIT:
        found.append(TEXTS["sums-scatter"].finding([], fit=describe_fit(fit)))
    elif fit.sags:
        found.append(TEXTS["sums-sag"].finding([], fit=describe_fit(fit)))
    return found


def fit_of(job: Mapping[str, Any]) -> RingFit | None:
    """Return latency and bandwidth of the test job's sums; None for one rank or too few sizes."""
    world_size = job.get("world_size", 1)
    try:
        timings = read_timings(job.get("between") or ())
        return fit_ring(timings, world_size) if world_size > 1 and len(timings) > 2 else None
    except (KeyError, TypeError, ValueError):
        return None


def describe_fit(fit: RingFit) -> str:
    """Return a fit in one line."""
    text = (
        f"all-reduce over {fit.num_ranks} ranks: alpha {fit.latency_s * 1e6:.0f} us,"
        f" beta {fit.bytes_per_s / 1e9:.2g} GB/s, R² {fit.r_squared:.3f}"
    )
    return text if fit.r_squared >= _GOOD_FIT else f"{text} (rough: the times scatter)"


def as_values(outcome: Outcome) -> dict[str, Any]:
    """Return everything as plain values; the keys are part of the command's interface."""
    fit = fit_of(outcome.job) if outcome.job is not None else None
    names = [row["node"] for row in outcome.nodes]
    return {
        "exit_code": outcome.exit_code,
        "findings": [codec.to_plain(finding) for finding in outcome.findings],
        "nodes": list(outcome.nodes),
        "pairs": [
            {
                "from": names[source] if source < len(names) else source,
                "to": names[target] if target < len(names) else target,
                "why_not": why,
                "latency_s": us / 1e6 if us is not None else None,
                "bytes_per_s": rate * 1e6 if rate is not None else None,
            }
            for source, target, why, us, rate in outcome.pairs
        ],
        "job": outcome.job,
        "fit": {
            "alpha_s": fit.latency_s,
            "beta_bytes_per_s": fit.bytes_per_s,
            "r_squared": fit.r_squared,
        }
        if fit is not None
        else None,
        "could_tell": outcome.could_tell,
        "seconds": outcome.seconds,
    }


def wait_for_job(run_dir: RunDir, *, limit_s: float = JOB_END_LIMIT_S) -> None:
    """Wait until the scheduler's job of a run has ended, at most `limit_s`.

    Return at once if the run has no such job or its state is unknown.
    """
    if not os.path.isfile(run_dir.job):
        return
    from torchmuster.launcher.jobs.jobs import view_newest

    pause, until = threading.Event(), time.monotonic() + limit_s
    while time.monotonic() < until:
        job = view_newest(run_dir)
        if job is None or job.state.is_final or job.state is JobState.UNKNOWN:
            return
        pause.wait(_JOB_POLL_S)


def remove_run(run_dir: RunDir) -> None:
    """Remove the run of a doctor after its results have been read."""
    shutil.rmtree(run_dir.path, ignore_errors=True)
