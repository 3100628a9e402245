"""What Slurm's states mean, its reason codes in sentences, whether a partition is too small for a job, and why sbatch refuses one.

Source: https://slurm.schedmd.com/job_reason_codes.html, and the section JOB REASON CODES of `man squeue`.
"""

import re
from collections.abc import Sequence

from torchmuster.engines.base import NodeQuestion, Refusal
from torchmuster.engines.wait_reasons import WaitReason, WaitReasons
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

_LIMITS = "`sacctmgr show associations user=$USER format=account,qos,grptres,maxtres,maxjobs`"
_QOS = "`sacctmgr show qos format=name,grptres,maxtrespu,maxjobspu,maxwall` lists the limits"
_PARTITION = (
    "`scontrol show partition` lists its limits; ask for less, or take another with --partition"
)
_NODES = "`sinfo --long --Node` lists the nodes and their states, `sinfo --list-reasons` why"


def _reason(
    pattern: str, sentence: str, hint: str = "", *, never: bool = False, may_be_never: bool = False
) -> WaitReason:
    return WaitReason(
        pattern=rf"(?:{pattern})(?![A-Za-z])",
        sentence=sentence,
        hint=hint,
        never=never,
        may_be_never=may_be_never,
    )


_TABLE = (
    _reason("Priority", "jobs with a higher priority are before it in the queue"),
    _reason("Resources", "it is its turn, and waits for nodes to become free"),
    _reason(
        "PartitionNodeLimit",
        "it asks for more nodes than the partition lets a job have, or than it has",
        _PARTITION,
        may_be_never=True,
    ),
    _reason(
        "PartitionConfig",
        "the partition's configuration can't satisfy the job",
        _PARTITION,
        may_be_never=True,
    ),
    _reason(
        "PartitionTimeLimit",
        "its time limit is longer than the partition allows",
        "`sinfo --format='%P %l'` lists the limits; lower --time, or take another partition",
    ),
    _reason("PartitionDown", "the partition is down: it takes jobs and starts none", _NODES),
    _reason(
        "PartitionInactive", "the partition is inactive: it takes no jobs and starts none", _NODES
    ),
    _reason(
        "ReqNodeNotAvail|Nodes required",
        "nodes that it needs are down, drained, reserved or in use",
        _NODES,
    ),
    _reason("NodeDown", "a node that it needs is down", _NODES),
    _reason("BadConstraints", "no node has what it asks for", "`sinfo --format='%P %f %G'` lists features and GPUs", never=True),
    _reason("DependencyNeverSatisfied", "a job that it depends on did not end as required", never=True),
    _reason("Dependency", "it waits for another job to end"),
    _reason("JobHeldUser", "you have held it", "`scontrol release JOB` releases it"),
    _reason("JobHeldAdmin", "an administrator has held it", "only an administrator can release it"),
    _reason(
        "JobHoldMaxRequeue",
        "it was started again too often, and is held now",
        "`scontrol release JOB` releases it; its log says what went wrong",
    ),
    _reason("BeginTime", "its time to begin has not come; a job that was started again waits two minutes"),
    _reason("Reservation", "it waits for its reservation to begin, or for others' to end", "`scontrol show reservation`"),
    _reason("ReservationDeleted|InvalidReservation", "its reservation does not exist any more", "`scontrol show reservation`"),
    _reason("Licenses", "it waits for a licence", "`scontrol show licenses` lists them"),
    _reason("InvalidAccount", "its account does not exist here any more", _LIMITS),
    _reason("InvalidQOS", "its QOS does not exist here any more", _QOS),
    _reason("AccountNotAllowed", "its account may not use this partition", _PARTITION),
    _reason("QOSNotAllowed", "its QOS may not be used by this account or in this partition", _QOS),
    _reason("QOSUsageThreshold", "its QOS has used up its limit for now", _QOS),
    _reason("QOSTimeLimit", "the time limit of its QOS is used up", _QOS),
    _reason("QOSJobLimit|QOSMaxJobs[A-Za-z]*|QOSMaxSubmit[A-Za-z]*", "the limit of running jobs of its QOS is reached", _QOS),
    _reason("QOSMaxWall[A-Za-z]*", "its time limit is longer than its QOS allows", _QOS),
    _reason("QOSMin[A-Za-z]*", "it asks for less than its QOS demands", _QOS),
    _reason("QOS(?:Max|Grp)[A-Za-z]*", "it would exceed a limit of its QOS", _QOS),
    _reason("QOSResourceLimit", "it would exceed a limit of its QOS", _QOS),
    _reason("AssocGrp[A-Za-z]*", "its account and its sub-accounts have used up their common limit", _LIMITS),
    _reason("AssocMaxJobs[A-Za-z]*", "your limit of running jobs is reached", _LIMITS),
    _reason("AssocMaxWall[A-Za-z]*", "its time limit is longer than your account allows", _LIMITS),
    _reason("AssocMax[A-Za-z]*", "it would exceed a limit of your account", _LIMITS),
    _reason("AssociationJobLimit|AssociationResourceLimit|AssociationTimeLimit", "it would exceed a limit of your account", _LIMITS),
    _reason("MaxMemPerLimit[A-Za-z]*", "it asks for more memory per CPU or node than allowed", _PARTITION),
    _reason("JobArrayTaskLimit", "the limit of running tasks of its array is reached"),
    _reason("JobLaunchFailure", "the last try to start it failed", "the log of slurmctld says why: ask the administrators"),
    _reason("NonZeroExitCode|RaisedSignal[A-Za-z:]*|TimeLimit", "its last start ended early"),
    _reason("SystemFailure", "Slurm itself, a file system or the network failed", "ask the administrators"),
    _reason("Prolog", "the prologue of its nodes still runs"),
    _reason("Cleaning", "it was started again, and its last start is being cleaned up"),
    _reason("BurstBuffer[A-Za-z]*|StageIn[A-Za-z]*|OutOfMemory", "its burst buffer is not ready"),
    _reason("FrontEndDown", "no front end of the cluster is up", _NODES),
    _reason("AccountingPolicy", "it would exceed a limit of your account or QOS", _LIMITS),
    _reason("Dead[Ll]ine[A-Za-z]*", "it can't end before its deadline any more"),
    _reason("FedJobLock|Federation[A-Za-z]*", "another cluster of the federation may start it"),
    _reason("PowerNotAvail|PowerReserved", "the cluster has no power left for it now"),
    _reason("Held|UserHeld", "it is held"),
)  # fmt: skip


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

# Source: the messages of Slurm, src/common/slurm_errno.c.
REFUSALS = (
    Refusal(
        pattern="invalid partition",
        error="Slurm knows no such partition",
        hint="`sinfo --summarize` lists the partitions; --partition chooses one",
    ),
    Refusal(
        pattern="time limit is invalid|time limit specification|exceeds .*time ?limit|MaxWall",
        error="the time limit is longer than the partition or your QOS allows",
        hint="`sinfo --format='%P %l'` lists the limits; lower --time (exec_timeout in a workflow) or choose"
        " another --partition",
    ),
    Refusal(
        pattern="MaxSubmit|GrpSubmit",
        error="you or your group have as many jobs as the account or QOS allows",
        hint="wait until one ends, or cancel one: `squeue --me` lists yours",
    ),
    Refusal(
        # After this sentence Slurm can't tell which limit; a line before it may name it.
        pattern=r"(qos|assoc)(max|min|grp)\w+|violates accounting",
        error="the job is beyond a limit of your account or QOS",
        hint="`sacctmgr show qos` and `sacctmgr show associations user=$USER` list the limits: ask for less, for less"
        " time, or wait until your other jobs have ended",
    ),
    Refusal(
        pattern="invalid qos|invalid account|account/partition combination|not permitted to use this partition",
        error="Slurm does not let this account use this partition or QOS",
        hint="`sacctmgr show associations user=$USER format=account,partition,qos` lists what you have;"
        " --account and --partition choose",
    ),
    Refusal(
        pattern="required partition not available|partition .*(inactive|drain|down)",
        error="the partition takes no jobs now",
        hint="`sinfo --summarize` shows which are up; --partition chooses another",
    ),
    Refusal(
        pattern=r"generic resource|\bgres\b|trackable resource",
        error="Slurm has no such GPU or other generic resource",
        hint="`sinfo --format='%P %G'` lists them; --gpus-per-node 0 (gpu: 0 in a workflow) asks for none",
    ),
    Refusal(
        pattern="node count specification",
        error="the partition does not take this number of nodes",
        hint="`scontrol show partition` lists MinNodes, MaxNodes and TotalNodes; --nodes asks for another number",
    ),
    Refusal(
        pattern="node configuration is not available|more processors|specification can not be",
        error="no node of the partition has this much",
        hint="`sinfo --format='%P %D %c %m %G'` lists nodes, CPUs, memory in MB and GPUs",
    ),
    Refusal(
        pattern="invalid feature",
        error="no node has this feature",
        hint="`sinfo --format='%P %f'` lists the features",
    ),
    Refusal(
        pattern="unable to open file|no such file",
        error="sbatch can't read the job script",
        hint="the run directory has to be on a file system that this machine sees",
    ),
    Refusal(
        pattern="timed out on",  # it may have heard the question, and was too busy to answer
        error="Slurm's controller did not answer in time",
        hint="`squeue --me` shows whether it has taken the job all the same; `scontrol ping` whether it answers",
    ),
    Refusal(
        pattern="unable to contact slurm controller|connection refused",
        error="Slurm's controller does not answer",
        hint="`scontrol ping` tells when it is back",
    ),
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
