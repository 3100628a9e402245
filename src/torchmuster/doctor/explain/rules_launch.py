"""Launch and rendezvous: who was started, with which numbers and names."""

from collections.abc import Iterator

from torchmuster.doctor.explain.case import Case, short
from torchmuster.doctor.explain.events import Event, Finding
from torchmuster.doctor.explain.weigh import HIGH, LOW, MEDIUM, Weight, at

def launcher_on_too_few_nodes(case: Case) -> Iterator[Finding]:
    """Rendezvous waited for nodes on which nobody had started the launcher."""
    waits = case.of("rdzv_timeout", "store_clients", "store_wait")
    timeouts = case.of("rdzv_timeout")
    if not timeouts and not case.of("store_clients"):
        return
    if case.of("store_connect", "store_validate", "rdzv_connection"):
        return  # somebody did call, and did not get through: that is the network's rule
    wanted = case.num_nodes
    speakers = _launch_speakers(case, waits)
    if wanted is None or wanted < 2:
        wanted = None
    silent = [host for host in case.allocated if host not in speakers] if speakers else case.silent
    if wanted is not None and len(speakers) >= wanted and not silent:
        return
    begin = case.earliest(timeouts or waits)
    number = f"of {wanted} nodes" if wanted else "of the nodes"
    spoke = ", ".join(sorted(speakers)) or "one node"
    evidence = [begin.line]
    evidence += [case.allocated[host] for host in silent[:3] if host in case.allocated]
    sure = bool(silent) or (wanted is not None and len(speakers) < wanted)
    yield Finding(
        cause="launcher-on-too-few-nodes",
        sentence=f"the launcher ran on {spoke} only, {number}: the others were waited for and never called",
        confidence=HIGH if silent and wanted else MEDIUM if sure else LOW,
        weight=Weight.ABSENCE,
        evidence=tuple(evidence),
        at=", ".join(silent[:8]) or None,
        because=tuple(f"{host} was allocated, and there is no line of it" for host in silent[:8]),
        ruled_out=(
            "a firewall or a wrong address: then a node that called would have logged a failed connection",
            "a crash in training: no rank was ever started",
        ),
        cure=(
            "a job script runs on its first node only: start one launcher on each node"
            " (`srun --ntasks-per-node=1 torchrun ...`, PBS: `pbsdsh`), or `muster torchrun ...`, which does it itself"
        ),
        confirm="pgrep -af torchrun   on every node of the job",
        began=begin.line,
    )


def _launch_speakers(case: Case, waits: list[Event]) -> set[str]:
    hosts = {short(event.who.host) for event in waits if event.who.host}
    return hosts | set(case.spoke)


def rendezvous_ids(case: Case) -> Iterator[Finding]:
    """Nodes waited for each other under different names or sizes."""
    for key, cause, word, cure in (
        ("run_id", "different-ids", "rdzv ids", "one id for all nodes: the scheduler's job id"),
        (
            "min_nodes",
            "different-sizes",
            "node counts",
            "take the number from the allocation: $SLURM_NNODES",
        ),
        (
            "rdzv_endpoint",
            "different-endpoints",
            "endpoints",
            "the same endpoint on all nodes: the head's",
        ),
    ):
        events = case.config(key)
        values = list(dict.fromkeys(event.get("value").strip() for event in events))
        if len(values) > 1 and not case.of("rdzv_complete"):
            yield Finding(
                cause=cause,
                sentence=f"the nodes use different {word}: {', '.join(values[:4])}",
                confidence=HIGH,
                weight=Weight.LAUNCH,
                evidence=tuple(event.line for event in events[:4]),
                cure=cure,
                confirm=f"grep -h {key} LOGS | sort | uniq -c",
                began=events[0].line,
            )
    if case.of("endpoint_ignored") and case.of("rdzv_timeout", "rdzv_connection"):
        event = case.of("endpoint_ignored")[0]
        yield Finding(
            cause="endpoint-ignored",
            sentence="--master_addr is ignored with --rdzv_backend c10d, so each node waits at its own localhost",
            confidence=HIGH, weight=Weight.LAUNCH, evidence=(event.line,), at=at(event), cure="give `--rdzv-endpoint=HEAD:PORT`", began=event.line,
        )  # fmt: skip
