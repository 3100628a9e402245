"""Lines that need a second look: what a node lacked, NCCL's warnings, a wrong provider."""

import re
from collections.abc import Iterator
from dataclasses import replace

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.explain.catalogue.entry import Weight
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS, rule_rows
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.rows import LOW, argue, evidence_of, found_by
from torchmuster.diagnose.explain.rules.shape import strength, wraps

_SOUNDS_FAILED = frozenset({"error_line", "raised_line", "exit_code", "exception", "cut_traceback"})
_FEW_LINES = 10  # what others may still write while NCCL fails


def nccl_warning(case: Case) -> Iterator[LogFinding]:
    """Report a warning of NCCL that no rule knows, unless the work continued as in healthy runs."""
    if not all(_work_continued(case, event) for event in case.of("nccl_warn")):
        yield from argue(RULE_ROWS["said.nccl-warning"], case)


def _work_continued(case: Case, warned: LogEvent) -> bool:
    """Return whether a program wrote much after a warning, and nothing that sounds failed."""
    for event in case.events:
        if event.line.path == warned.line.path and event.line.order <= warned.line.order:
            continue
        if event.kind != "nccl_warn" and event.role in (LineRole.CAUSE, LineRole.ECHO):
            return False
        if event.kind in _SOUNDS_FAILED and (strength(event) or wraps(event)):
            return False
    after = [
        line
        for log in case.record.logs
        for line in log.last
        if line.path == warned.line.path and line.order > warned.line.order
    ]
    return len([line for line in after if line.text and "NCCL" not in line.text]) > _FEW_LINES


def could_not_start(case: Case) -> Iterator[LogFinding]:
    """Report what a node lacked before any training; other nodes may lack it too, or only wait."""
    waited = case.of("rdzv_timeout", "store_wait", "store_clients", "rdzv_connection")
    ruled_out = ("the network: the other nodes only waited for this one",) if waited else ()
    for row in rule_rows("missing."):
        hosts = sorted({short(e.who.host) for e in evidence_of(row, case) if e.who.host})
        same = (f"the same on {', '.join(hosts)}",) if len(hosts) > 1 else ()
        for finding in argue(row, case):
            found = replace(finding, because=same, ruled_out=ruled_out)
            if _had_failed_before(case, finding):
                found = replace(found, confidence=LOW, weight=Weight.ENVELOPE - 1)
            yield found


def _had_failed_before(case: Case, finding: LogFinding) -> bool:
    """Return whether training had failed before: what a script lacks after that is no cause."""
    began = finding.began
    return began is not None and any(
        event.line.path == began.path and event.line.order < began.order
        for event in case.of("root_cause_table", "child_failed", "exception")
        if event.kind != "exception" or event.get("uncaught")
    )


_SLINGSHOT = re.compile(r"\bhsn\d|\bcxi\b|cray", re.IGNORECASE)
_OWN_PLUGIN = re.compile(r"aws[-_]ofi", re.IGNORECASE)
_WRONG_PROVIDER = RULE_ROWS["said.wrong-provider"]


def wrong_provider(case: Case) -> Iterator[LogFinding]:
    """Report a libfabric provider for another kind of network than this machine's."""
    asked = case.variable("FI_PROVIDER")
    headers = [line for log in case.record.logs for line in log.header]
    plugin = [line for line in headers if _OWN_PLUGIN.search(line.text)]
    if not any(_SLINGSHOT.search(line.text) for line in headers):
        return
    if asked is not None and asked.get("value") == "efa":
        yield found_by(case, _WRONG_PROVIDER, [asked], at=None)
    elif asked is None and plugin:
        yield LogFinding(
            cause="wrong-provider",
            error=(
                "an own aws-ofi-nccl is used on a Cray: with FI_PROVIDER=efa, as recipes for Amazon set it,"
                " NCCL would find no network here"
            ),
            confidence=LOW,
            weight=_WRONG_PROVIDER.weight,
            evidence=(plugin[0],),
            hint=_WRONG_PROVIDER.hint,
            confirm=_WRONG_PROVIDER.confirm,
            began=plugin[0],
        )
