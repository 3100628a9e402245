"""What PBS writes into a job's comment while it waits, in sentences, and what its hosts have.

Source: OpenPBS, src/scheduler/job_info.c and constant.h; seen in version 23.06.
"""

import re
from collections.abc import Sequence

from torchmuster.engines.wait_reasons import WaitReason, WaitReasons

_QUEUE = "`qstat -Qf` lists the queues and their limits; another one with --queue"
_HOSTS = "`pbsnodes -aSj` lists the hosts with what is free"
_LIMIT = "`qstat -Bf` and `qstat -Qf` list the limits"


def _reason(pattern: str, sentence: str, hint: str = "", *, never: bool = False) -> WaitReason:
    return WaitReason(pattern=rf"(?i){pattern}", sentence=sentence, hint=hint, never=never)


# The more special first.
_TABLE = (
    _reason(
        "Can Never Run.*(?:total nodes|Not enough)",
        "it asks for more hosts or resources than exist",
        _HOSTS,
        never=True,
    ),
    _reason("Can Never Run", "the scheduler says that it can't run here", _HOSTS, never=True),
    _reason("Not Running:? Queue not started", "its queue takes jobs and starts none now", _QUEUE),
    _reason("Not Running.*Insufficient amount of queue resource", "its queue has no more of that resource now", _QUEUE),
    _reason("Not Running.*Insufficient amount of server resource", "the server has no more of that resource now", _LIMIT),
    _reason("Not Running.*(?:Insufficient amount of resource|Not enough free nodes)", "it waits for hosts to become free", _HOSTS),
    _reason("Not Running.*Not enough total nodes", "not enough hosts are up", _HOSTS),
    _reason("Not Running.*limit.*(?:user|group|project)|Not Running.*(?:User|Group|Project) has", "you, your group or your project have reached a limit of running jobs", _LIMIT),
    _reason("Not Running.*limit", "a limit of the server or its queue is reached", _LIMIT),
    _reason("Not Running.*(?:dedicated time|primetime|cross)", "it would not end before a time in which the site allows other jobs only", "a shorter --time may start earlier"),
    _reason("Not Running.*(?:would conflict|Reservation|reserved)", "it would delay a reservation or a job before it", "a shorter --time may start earlier"),
    _reason("Not Running.*(?:Draining|strict|top job|higher priority|starving)", "jobs with a higher priority are before it in the queue"),
    _reason("Not Running.*Host not|Not Running.*No available resources|Not Running.*node", "no host has what it asks for now", _HOSTS),
    _reason("Not Running.*depend", "it waits for another job to end"),
    _reason("Not Running", "the scheduler has looked at it and does not start it now", _HOSTS),
    _reason("Job held by \\S+ on|Job held by user", "a user has held it", "`qrls JOB` releases it"),
    _reason("Job held", "it is held", "`qstat -f JOB` shows who holds it (Hold_Types); `qrls JOB` releases a user's hold"),
    _reason("waits: ", "it waits for another job to end"),
    _reason("job held, too many failed attempts", "it failed to start too often, and is held now", "ask the administrators"),
)  # fmt: skip


def capacity_argv(job_id: str) -> list[list[str]]:
    """Return the command that tells what the hosts have."""
    del job_id  # its comment has said what is too much
    return [["pbsnodes", "-a"]]


def shortage(answers: Sequence[str]) -> str | None:
    """Return what the hosts have, from `pbsnodes -a`; None where it can't be read."""
    counts: dict[int, int] = {}
    for text in re.findall(r"resources_available\.ncpus = (\d+)", answers[0] if answers else ""):
        counts[int(text)] = counts.get(int(text), 0) + 1
    if not counts:
        return None
    sizes = [
        f"{counts[n]} host{'s' if counts[n] != 1 else ''} of {n} CPUs"
        for n in sorted(counts, reverse=True)
    ]
    return f"this PBS has {' and '.join(sizes)}"


REASONS = WaitReasons(table=_TABLE, capacity_argv=capacity_argv, shortage=shortage)
