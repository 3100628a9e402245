"""What Slurm's states mean, its reason codes in sentences, whether a partition is too small for a job, and why sbatch refuses one.

Source: https://slurm.schedmd.com/job_reason_codes.html, and the section JOB REASON CODES of `man squeue`.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from torchmuster.engines.base import NodeQuestion, PreemptionQuestion, clock_seconds
from torchmuster.engines.wait_reasons import WaitReasons, read_words
from torchmuster.model.nodelist import expand_hostlist
from torchmuster.model.states import JobState

# Source: https://slurm.schedmd.com/job_state_codes.html, states and flags.
STATES = {
    "PENDING": JobState.PENDING,
    "CONFIGURING": JobState.PENDING,  # nodes boot, the script has not begun
    "EXPEDITING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "SUSPENDED": JobState.SUSPENDED,
    "STOPPED": JobState.SUSPENDED,
    "REQUEUE_HOLD": JobState.HELD,
    "RESV_DEL_HOLD": JobState.HELD,
    "SPECIAL_EXIT": JobState.HELD,
    "COMPLETING": JobState.ENDING,
    "STAGE_OUT": JobState.ENDING,
    "COMPLETED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMED_OUT,
    "DEADLINE": JobState.TIMED_OUT,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    "NODE_FAIL": JobState.NODE_FAILED,
    "BOOT_FAIL": JobState.NODE_FAILED,
    "LAUNCH_FAILED": JobState.NODE_FAILED,
    "PREEMPTED": JobState.PREEMPTED,
    "REQUEUED": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
}

_WORDS = read_words(os.path.join(os.path.dirname(__file__), "slurm.txt"), "(?:{})(?![A-Za-z])")
REFUSALS = _WORDS.refuses


def capacity_argv(job_id: str) -> list[list[str]]:
    """Return the commands that tell what a job asks for, and what its partition has and allows."""
    return [
        ["scontrol", "--oneliner", "show", "job", job_id],
        ["sinfo", "--noheader", "--exact", "--format=%P|%D|%c"],
        ["scontrol", "--oneliner", "show", "partition"],
    ]


def shortage(answers: Sequence[str]) -> str | None:
    """Return what the partition has or allows where a job asks for more; None where it doesn't."""
    if len(answers) != 3:
        return None
    asked = dict(re.findall(r"(?:^| )(Partition|NumNodes|MinCPUsNode|TimeLimit)=(\S+)", answers[0]))
    return _too_few_nodes(asked, answers[1]) or _too_low_limit(asked, answers[2])


def _too_low_limit(asked: Mapping[str, str], partitions: str) -> str | None:
    """Source: https://slurm.schedmd.com/scontrol.html, "show partition": MaxTime, MaxNodes."""
    name = asked.get("Partition", "")
    lines = (line for line in partitions.splitlines() if f"PartitionName={name} " in line)
    allowed = dict(re.findall(r"(?:^| )(MaxTime|MaxNodes)=(\S+)", next(lines, "")))
    most_s, wanted_s = (
        clock_seconds(text or "") for text in (allowed.get("MaxTime"), asked.get("TimeLimit"))
    )
    if most_s is not None and wanted_s is not None and wanted_s > most_s:
        return (
            f"partition {name} allows {allowed['MaxTime']}; the job asks for {asked['TimeLimit']}"
        )
    most, wanted = allowed.get("MaxNodes", ""), asked.get("NumNodes", "0").partition("-")[0]
    if most.isdecimal() and wanted.isdecimal() and int(wanted) > int(most):
        return f"partition {name} allows a job {most} {_nodes(int(most))}; it asks for {wanted}"
    return None


def _too_few_nodes(asked: Mapping[str, str], sinfo: str) -> str | None:
    sizes = _sizes(sinfo, asked.get("Partition", ""))
    num_asked = int(asked.get("NumNodes", "0").partition("-")[0] or 0)
    cpus_asked = int(
        asked.get("MinCPUsNode", "0") if asked.get("MinCPUsNode", "0").isdecimal() else 0
    )
    num_fit = sum(number for number, cpus in sizes if cpus >= cpus_asked)
    if not sizes or num_asked <= num_fit:
        return None
    has = " and ".join(f"{number} {_nodes(number)} of {cpus} CPUs" for number, cpus in sizes)
    of_cpus = f" of at least {cpus_asked} CPUs" if cpus_asked > min(c for _, c in sizes) else ""
    return f"partition {asked['Partition']} has {has}; the job asks for {num_asked} {_nodes(num_asked)}{of_cpus}"


def _nodes(number: int) -> str:
    return "node" if number == 1 else "nodes"


def _sizes(text: str, partition: str) -> list[tuple[int, int]]:
    """Return (how many nodes, CPUs of each), the largest first."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) == 3 and cells[0].rstrip("*") == partition and cells[1].isdecimal():
            cpus = int(cells[2]) if cells[2].isdecimal() else 0
            found[cpus] = found.get(cpus, 0) + int(cells[1])
    return [(found[cpus], cpus) for cpus in sorted(found, reverse=True)]


REASONS = WaitReasons(
    table=_WORDS.waits,
    capacity_argv=capacity_argv,
    shortage=shortage,
    last_words=_WORDS.ends,
    gone=_WORDS.gone,
)


# A node of a job: whether its machine is lost.
# Source: https://slurm.schedmd.com/sinfo.html, "NODE STATE CODES": down, and what powers off.
_LOST = frozenset({"DOWN", "POWERED_DOWN", "POWERING_DOWN", "FAIL"})


def argv_of_node(job_id: str, node: str) -> list[list[str]]:
    """Return the commands that tell: of the node, and of the job, which a lost node is taken from."""
    show = ["scontrol", "--oneliner", "show"]
    return [[*show, "node", node], [*show, "job", job_id]]


def node_is_lost(stdout: str, node: str) -> str | None:
    """Return in what words one of those answers says that the node is lost to its job; None when it does not."""
    named = re.search(r"(?:^|\s)NodeName=(\S+)", stdout)
    if named is not None:
        state = re.search(r"\sState=([A-Z_+*~#!%$@^-]+)", stdout)
        words = re.split(r"[^A-Z_]+", state[1]) if state is not None else []
        lost = sorted(_LOST.intersection(words)) if named[1] == node else []
        return f"its state is {lost[0]}" if lost else None
    if not re.search(r"(?:^|\s)JobState=RUNNING(?:\s|$)", stdout):
        return None
    listed = re.search(r"\sNodeList=(\S+)", stdout)
    try:
        names = expand_hostlist(listed[1]) if listed is not None else ()
    except ValueError:
        return None
    return "it is no longer a node of the job" if names and node not in names else None


LOST_NODE = NodeQuestion(argv_for=argv_of_node, is_lost=node_is_lost)


def _grace_s(stdout: str) -> float | None:
    """Return the grace of a job that is preempted. Recorded from 22.05: PreemptTime is its begin, and EndTime then its end.

    That of a job without a time limit is `Unknown` as long as it is in the future (`slurm_sprint_job_info`).
    """
    found = dict(re.findall(r"(?:^|\s)(JobState|PreemptTime|EndTime)=(\S+)", stdout))
    if found.get("JobState") != "RUNNING":
        return None
    try:
        begin = datetime.fromisoformat(found["PreemptTime"])
        if found["EndTime"] == "Unknown":
            return math.inf
        return max(0.0, (datetime.fromisoformat(found["EndTime"]) - begin).total_seconds())
    except (KeyError, ValueError):  # e.g. `None`
        return None


def _is_the_end(job: str, partitions: str) -> bool:
    """Say whether Slurm only cancels this job. Source: slurm.conf.html, PreemptMode; `sbatch --no-requeue`."""
    found = dict(re.findall(r"(?:^|\s)(Requeue|Partition)=(\S+)", job))
    lines = partitions.splitlines()
    own = next((one for one in lines if f"PartitionName={found.get('Partition')} " in one), "")
    return found.get("Requeue") == "0" or " PreemptMode=CANCEL " in f"{own} "


PREEMPTION = PreemptionQuestion(
    argv_for=lambda job_id: ["scontrol", "--oneliner", "show", "job", job_id],
    grace_s=_grace_s,
    argv_of_rules=("scontrol", "--oneliner", "show", "partition"),
    is_the_end=_is_the_end,
)
