"""Nodes held against each other: versions that differ, and an interface that is not the one that was asked for."""

import re
from collections.abc import Iterator

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.explain.events import LogFinding, LogLine
from torchmuster.diagnose.explain.rules.rows import LOW, MEDIUM, Rule, Weight

_VERSIONS = {
    "NCCL": re.compile(r"\bNCCL version (\d+\.\d+(?:\.\d+)?)"),
    "torch": re.compile(
        r"\b(?:torch|pytorch)(?: version|==|: | )\W{0,2}(\d+\.\d+\.\d+)", re.IGNORECASE
    ),
    "driver": re.compile(r"\b[Dd]river [Vv]ersion:? ?(\d{3}\.\d+(?:\.\d+)?)"),
    "python": re.compile(r"\b[Pp]ython(?: version|:)? ?(3\.\d+)(?:\.\d+)?\b(?!/)"),
}
_INTERFACE = re.compile(
    r"(?:NET/(?:Socket|IB|OFI) ?:? Using|Bootstrap ?:? Using) (?:\[\d+\])?(?P<name>[\w.-]+):(?P<address>[\d.a-fA-F:]+)<"
)
_ECHOES = (
    "nccl_remote",
    "nccl_envelope",
    "nccl_warn",
    "peer_lost",
    "watchdog",
    "store_clients",
    "store_wait",
    "store_connect",
)


def versions_differ(case: Case) -> Iterator[LogFinding]:
    """One node has another version than the rest: a reason for messages that no peer understands."""
    if not case.of(*_ECHOES):
        return
    for what, regex in _VERSIONS.items():
        told = _by_host(case, regex)
        values = {value for value, _ in told.values()}
        if len(values) < 2:
            continue
        shown = ", ".join(f"{host}: {value}" for host, (value, _) in sorted(told.items())[:6])
        lines = tuple(dict(told.values()).values())
        yield LogFinding(
            cause="nccl-versions-differ" if what == "NCCL" else "versions-differ",
            error=f"the nodes have different versions of {what}: {shown}",
            confidence=MEDIUM if what in ("NCCL", "torch") else LOW,
            weight=Weight.NETWORK if what in ("NCCL", "torch") else Weight.ENVELOPE + 1,
            evidence=lines[:4],
            hint="use one environment on all nodes: the same folder, container image or lock file",
            confirm="python -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())'   on every node",
            began=min(lines, key=lambda line: line.order),
        )


def other_interface(case: Case) -> Iterator[LogFinding]:
    """NCCL uses another interface than NCCL_SOCKET_IFNAME asks for, or nodes use interfaces of different networks."""
    if not case.of(*_ECHOES):
        return
    used = {host: (name, line) for host, (name, line) in _by_host(case, _INTERFACE).items()}
    names = {name for name, _ in used.values()}
    if len(used) < 2 or len(names) < 2 or case.variable("NCCL_SOCKET_IFNAME") is not None:
        return
    shown = ", ".join(f"{host}: {name}" for host, (name, _) in sorted(used.items())[:6])
    lines = tuple(dict(used.values()).values())
    yield LogFinding(
        cause="no-route",
        error=f"the nodes use interfaces of different names for NCCL ({shown}), which may be of networks that don't reach each other",
        confidence=LOW,
        weight=Weight.ENVELOPE + 2,
        evidence=lines[:4],
        hint="NCCL_SOCKET_IFNAME=NAME with the interface by which all nodes reach each other (`ip -br addr`)",
        confirm="muster doctor   on these nodes",
        began=min(lines, key=lambda line: line.order),
    )


def _by_host(case: Case, regex: re.Pattern[str]) -> dict[str, tuple[str, LogLine]]:
    """Return the first match of each host that can be told."""
    found: dict[str, tuple[str, LogLine]] = {}
    lines = [line for log in case.record.logs for line in (*log.header, *log.last)]
    for line in sorted(
        (*lines, *(event.line for event in case.events)), key=lambda line: line.order
    ):
        match = regex.search(line.text) if line.who.host else None
        if match is not None and line.who.host:
            found.setdefault(short(line.who.host), (match[1], line))
    return found


RULES: tuple[Rule, ...] = (versions_differ, other_interface)
