"""What the scheduler says of a job's end: its time, another job, a lost node, a user."""

from collections.abc import Iterator

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogFinding
from torchmuster.diagnose.explain.weigh import HIGH, MEDIUM, Weight, at

# Kind of event: cause, sentence, cure.
_ENDS = {
    "preempted": (
        "preempted",
        "the scheduler took the nodes back for another job",
        "save on SIGUSR1 or SIGTERM and let the job requeue: `muster run` does both",
    ),
    "node_failed": (
        "node-failed",
        "the scheduler lost a node of the job",
        "exclude the node and start again; `muster run --nodes MIN:MAX` goes on without it",
    ),
    "evicted": (
        "evicted",
        "the node ran short of a resource and the pod was evicted",
        "ask for the memory and storage that the pod really needs",
    ),
}


def time_limit(case: Case) -> Iterator[LogFinding]:
    """The scheduler ended the job because its time was up."""
    event = case.first("time_limit")
    if event is None:
        return
    yield LogFinding(
        cause="time-limit",
        error="the scheduler ended the job: its time limit was reached",
        confidence=HIGH,
        weight=Weight.SCHEDULER,
        evidence=(event.line,),
        at=at(event),
        hint="ask for more time, or save and continue: `muster run --time 8h --resubmit 3`",
        confirm="sacct -j JOB -o State,Elapsed,Timelimit   (PBS: qstat -xf JOB | grep walltime)",
        began=event.line,
    )


def ended_by_scheduler(case: Case) -> Iterator[LogFinding]:
    """Preempted, evicted, or a node failed."""
    for kind, (cause, sentence, cure) in _ENDS.items():
        event = case.first(kind)
        if event is None:
            continue
        node = event.get("host") or event.get("node")
        yield LogFinding(
            cause=cause,
            error=sentence,
            confidence=HIGH,
            weight=Weight.SCHEDULER,
            evidence=(event.line,),
            at=node or at(event),
            hint=cure,
            began=event.line,
        )


def killed_by_pbs(case: Case) -> Iterator[LogFinding]:
    """PBS says in words of its own why it ended the job."""
    event = case.first("pbs_killed")
    if event is None:
        return
    yield LogFinding(
        cause="scheduler-ended",
        error=f"PBS ended the job: {event.get('why')}",
        confidence=HIGH,
        weight=Weight.SCHEDULER,
        evidence=(event.line,),
        at=at(event),
        hint="`tracejob JOB` on the server, or the site's staff, can say more",
        began=event.line,
    )


def cancelled(case: Case) -> Iterator[LogFinding]:
    """Somebody cancelled it; schedulers also cancel what is left of a job that failed by itself."""
    event = case.first("cancelled")
    if event is None or case.of("time_limit", "preempted", "node_failed"):
        return
    yield LogFinding(
        cause="cancelled",
        error="the job was cancelled from outside",
        confidence=MEDIUM,
        weight=Weight.SIGNAL,
        evidence=(event.line,),
        at=at(event),
        hint="ask who cancelled it: you, a colleague, or the site's staff",
        confirm="sacct -j JOB -o State%30   (the number behind `CANCELLED by` is a user)",
        began=event.line,
    )
