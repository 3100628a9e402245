"""What Slurm's states mean, its reason codes in sentences, whether a partition is too small for a job, and why sbatch refuses one.

Source: https://slurm.schedmd.com/job_reason_codes.html, and the section JOB REASON CODES of `man squeue`.
"""

import os
import re
from collections.abc import Sequence

from torchmuster.engines.base import NodeQuestion
from torchmuster.engines.wait_reasons import WaitReasons, read_reasons
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
    "SUSPENDED": JobState.HELD,  # has its nodes, goes on only when somebody lets it
    "STOPPED": JobState.HELD,
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

_TABLE, REFUSALS = read_reasons(
    os.path.join(os.path.dirname(__file__), "slurm.txt"), "(?:{})(?![A-Za-z])"
)


def capacity_argv(job_id: str) -> list[list[str]]:
    """Return the commands that tell what a job asks for and what its partition has."""
    return [
        ["scontrol", "--oneliner", "show", "job", job_id],
        ["sinfo", "--noheader", "--exact", "--format=%P|%D|%c"],
    ]


def shortage(answers: Sequence[str]) -> str | None:
    """Return what the partition has where a job asks for more nodes or larger ones; None where it doesn't."""
    if len(answers) != 2:
        return None
    asked = dict(re.findall(r"(?:^| )(Partition|NumNodes|MinCPUsNode)=(\S+)", answers[0]))
    sizes = _sizes(answers[1], asked.get("Partition", ""))
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


REASONS = WaitReasons(table=_TABLE, capacity_argv=capacity_argv, shortage=shortage)


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
