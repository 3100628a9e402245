"""Ends by signals and for want of memory."""

import signal
from collections.abc import Iterator

from torchmuster.doctor.explain.case import Case
from torchmuster.doctor.explain.events import Event, Finding
from torchmuster.doctor.explain.weigh import HIGH, LOW, MEDIUM, Weight, at

def out_of_memory(case: Case) -> Iterator[Finding]:
    """The kernel or the scheduler says that it killed for want of memory."""
    proof = case.first("oom_proof")
    if proof is None:
        return
    yield Finding(
        cause="out-of-memory",
        sentence=f"the memory of {proof.who.host or 'a node'} (or of the job's limit) ran out, and a process was killed for it",
        confidence=HIGH,
        weight=Weight.PROVED,
        evidence=(proof.line, *(e.line for e in _killed(case, 9)[:2])),
        at=at(proof),
        ruled_out=("a GPU out of memory: that raises an exception and kills nobody",),
        cure="ask for more memory (--mem), use fewer loader workers, smaller batches",
        confirm="sacct -j JOB -o MaxRSS,ReqMem,State   (PBS: qstat -xf JOB | grep resources_used.mem)",
        began=proof.line,
    )


def _killed(case: Case, signum: int) -> list[Event]:
    names = {signal.Signals(signum).name.removeprefix("SIG")}
    words = {
        9: "Killed",
        11: "Segmentation fault",
        7: "Bus error",
        6: "Aborted",
        4: "Illegal instruction",
    }
    found = [
        e for e in case.of("child_failed") if e.get("code") in (f"-{signum}", str(128 + signum))
    ]
    found += [
        e
        for e in case.of("signal_received")
        if e.get("signal") in names or e.get("signum") == str(signum)
    ]
    found += [
        e
        for e in case.of("killed_line", "task_exit", "loader_killed")
        if words.get(signum, "?") in e.line.text
    ]
    found += [
        e
        for e in case.of("table_row")
        if e.get("key") == "exitcode"
        and e.get("value").startswith((f"-{signum} ", f"{128 + signum} "))
    ]
    return sorted(found, key=lambda e: e.line.order)


def signals(case: Case) -> Iterator[Finding]:
    """A process was ended by a signal that nobody explains."""
    for signum, cause, sentence, cure in (
        (11, "segfault", "a worker crashed in native code (SIGSEGV)", "PYTHONFAULTHANDLER=1 shows where; a wrong build of an extension is the usual reason"),
        (7, "bus-error", "a worker was ended by SIGBUS: shared memory is full, or a mapped file shrank", "a larger /dev/shm; copy mapped data to the node"),
        (4, "illegal-instruction", "a worker met an instruction that this processor lacks", "install a build for this processor"),
        (9, "killed", "a worker was killed (SIGKILL), and nothing here says by whom", "most often memory: look for an out-of-memory line of the kernel or the scheduler, else ask who kills"),
        (1, "hangup", "the terminal went away (SIGHUP) and took the job with it", "start it with `muster run --detach`, tmux or a scheduler"),
        (6, "aborted", "a worker aborted (SIGABRT)", "read its last lines: an assertion or a terminate of C++ stands there"),
    ):  # fmt: skip
        found = _killed(case, signum)
        if (
            not found
            or (signum == 9 and case.of("oom_proof"))
            or (signum == 6 and case.of("watchdog", "peer_lost"))
        ):
            continue
        event = case.earliest(found)
        yield Finding(
            cause=cause,
            sentence=sentence,
            confidence=MEDIUM if signum in (11, 7, 4, 1) else LOW,
            weight=Weight.SIGNAL if signum != 6 else Weight.COLLECTIVE,
            evidence=tuple(e.line for e in found[:3]),
            at=at(event),
            cure=cure,
            confirm="dmesg -T | grep -i 'killed process'; sacct -j JOB -o State,MaxRSS"
            if signum == 9
            else None,
            began=event.line,
        )
