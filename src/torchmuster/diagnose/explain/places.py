"""Where the cause stands when it is not in the logs that were given."""

import re

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogLine

_EVERYTHING = (
    "the output and error files of every node, from the first line on",
    "the job script, and the scheduler's own record (sacct -j JOB, qstat -xf JOB)",
)
_LOUDER = (
    "a run with TORCH_CPP_LOG_LEVEL=INFO LOGLEVEL=INFO NCCL_DEBUG=WARN, or `muster run --debug`"
)


def where_to_look(case: Case) -> tuple[str, ...]:
    """Return the places that would have the cause, the likeliest first."""
    louder = () if "nccl-info" in case.surroundings else (_LOUDER,)
    return (*_near(case), *_EVERYTHING, *louder)


# Hydra's word on a rank that was killed.
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
