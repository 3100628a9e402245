"""Collectives that never ended, and connections lost because of somebody else."""

from collections.abc import Iterator

from torchmuster.doctor.explain.case import Case
from torchmuster.doctor.explain.events import Finding
from torchmuster.doctor.explain.weigh import HIGH, LOW, MEDIUM, Weight, at

def stuck_collective(case: Case) -> Iterator[Finding]:
    """Ranks waited in a collective: who did not come is the one to look at."""
    waits = case.of("watchdog", "gloo_timeout")
    if not waits:
        return
    waiting = {e.who.rank for e in waits if e.who.rank is not None}
    by_rank = {
        e.who.rank: (e.get("seq"), e.get("op"))
        for e in waits
        if e.get("seq") and e.who.rank is not None
    }
    event = case.earliest(waits)
    size = case.world_size
    if len(set(by_rank.values())) > 1:
        shown = ", ".join(
            f"rank {rank}: {op} number {seq}" for rank, (seq, op) in sorted(by_rank.items())[:4]
        )
        yield Finding(
            cause="collectives-differ", sentence=f"the ranks wait in different collectives: {shown}", confidence=HIGH,
            weight=Weight.COLLECTIVE + 2, evidence=tuple(e.line for e in waits[:4]), at=at(event), began=event.line,
            ruled_out=("a slow network: then all would wait in the same one",),
            cure="a branch that depends on the rank (saving, evaluation, logging) makes or skips a collective: make it on all ranks",
            confirm="TORCH_DISTRIBUTED_DEBUG=DETAIL for 20 steps names both calls",
        )  # fmt: skip
        return
    missing = sorted(set(range(size)) - waiting) if size and waiting and len(waiting) < size else []
    behind = _behind(case)
    named = ", ".join(map(str, missing[:8])) or (str(behind) if behind else "")
    yield Finding(
        cause="rank-missing-in-collective",
        sentence=f"a collective waited for {f'rank {named}' if named else 'a rank'} until its time-out",
        confidence=MEDIUM if named else LOW,
        weight=Weight.COLLECTIVE,
        evidence=tuple(e.line for e in waits[:3]),
        at=at(event),
        because=("the ranks that print the time-out are those that did come",),
        cure="see what the missing rank did: data, saving, another branch, a dead node; a longer time-out only waits longer",
        confirm="muster stacks RUN, or py-spy dump --pid PID of the missing rank, while it hangs",
        began=event.line,
    )


def _behind(case: Case) -> object:
    progress = case.progress
    if len(progress) < 2:
        return None
    least = min(progress.values())
    slow = [who for who, number in progress.items() if number == least]
    return slow[0] if len(slow) == 1 and least < max(progress.values()) else None


def only_echoes(case: Case) -> Iterator[Finding]:
    """Connections were lost, and who went first did not leave a word."""
    lost = case.of("peer_lost", "nccl_remote", "store_get", "rdzv_closed")
    if not lost:
        return
    event = case.earliest(lost)
    named = [e.get("host") for e in lost if e.get("host")]
    peer = max(set(named), key=named.count) if named else ""
    yield Finding(
        cause="peer-lost",
        sentence=f"ranks lost the connection to {peer or 'another one'}; why it went is not in these logs",
        confidence=LOW,
        weight=Weight.ENVELOPE,
        evidence=tuple(e.line for e in lost[:3]),
        at=at(event),
        cure=f"read the last lines of the ranks on {peer or 'the node that went'}: the cause stands there",
        began=event.line,
    )
