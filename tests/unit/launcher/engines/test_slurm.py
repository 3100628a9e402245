"""Scripts word for word, and answers recorded from Slurm 22.05.8 with two nodes."""

import math
import re

import pytest
from tests.unit.launcher.model.jobs import AFTER, JOBS, ODD_PATH, request

from torchmuster.errors import UsageError
from torchmuster.launcher.engines import slurm
from torchmuster.launcher.engines.base import EngineError, NodeStart
from torchmuster.launcher.engines.slurm import DIALECT
from torchmuster.launcher.model.job import (
    AllocatedNode,
    Allocation,
    JobState,
    JobView,
    NodeChunk,
    NodeLauncher,
    describe_job,
)

SQUEUE = """squeue|4|CANCELLED|DependencyNeverSatisfied|2026-11-21T13:21:10|
squeue|6|CANCELLED|None|2026-11-21T13:21:10|n1
squeue|1|COMPLETED|None|2026-11-21T13:21:10|n[1-2]
squeue|7+0|COMPLETED|None|2026-11-21T13:21:10|n2
squeue|7+1|COMPLETED|None|2026-11-21T13:21:10|n1
squeue|3|FAILED|NonZeroExitCode|2026-11-21T13:21:10|n1
squeue|5|PENDING|JobHeldUser|N/A|
squeue|12|PENDING|PartitionNodeLimit|N/A|
squeue|18|COMPLETING|None|2026-11-21T13:22:07|n1
squeue|17|RUNNING|None|2026-11-21T13:22:02|n1
"""
SCONTROL = """\
JobId=3 JobName=fail UserId=root(0) Account=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 ExitCode=7:0 StartTime=2026-11-21T13:21:10 ReqNodeList=(null) ExcNodeList=(null) NodeList=n1 BatchHost=n1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* Command=/tmp/a JobState=COMPLETED.sh
JobId=4 JobName=never JobState=CANCELLED Reason=DependencyNeverSatisfied Dependency=afterok:3(failed) ExitCode=0:0 StartTime=2026-11-21T13:21:10 NodeList= NumNodes=1
JobId=6 JobName=kill JobState=CANCELLED Reason=None ExitCode=0:15 StartTime=2026-11-21T13:21:10 NodeList=n1
JobId=1 JobName=ok JobState=COMPLETED Reason=None ExitCode=0:0 StartTime=2026-11-21T13:21:10 NodeList=n[1-2] BatchHost=n1
"""
# From the manual: the recorded cluster had no accounting.
SACCT = """21|21|COMPLETED|0:0|None|2026-11-21T10:00:00|n1
22|22|CANCELLED by 1000|0:15|None|2026-11-21T10:00:00|n[1-2]
23|23|OUT_OF_MEMORY|0:125|None|2026-11-21T10:00:00|n1
24|24|TIMEOUT|0:0|TimeLimit|2026-11-21T10:00:00|n1
25|25+0|RUNNING|0:0|None|2026-11-21T10:00:00|n1
26|25+1|RUNNING|0:0|None|2026-11-21T10:00:00|n2
"""
HET = {
    "SLURM_JOB_ID": "8",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1,3]",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "2",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "1(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1(x2)",
    "SLURM_GPUS_PER_NODE_HET_GROUP_1": "a100:1,h100:3",
}


@pytest.mark.parametrize("name", JOBS)
def test_whole_script(name, golden):
    golden("scripts/slurm.txt", name, DIALECT.script(JOBS[name]))


def test_key_and_line_of_the_site_take_the_place_of_ours():
    chunk = NodeChunk(gpus=4, memory_bytes=1 << 30, extra=(("gpus-per-node", "a100:4"),))
    script = DIALECT.script(request(chunks=(chunk,), directives=("#SBATCH --mem=0",)))
    ours = [line for line in script.splitlines() if "--mem" in line or "gpus-per-node" in line]
    assert ours == ["#SBATCH --gpus-per-node=a100:4", "#SBATCH --mem=0"]


def test_backslash_in_the_log_path_is_refused():
    with pytest.raises(UsageError, match="backslash"):
        DIALECT.script(request(log_path="/a\\b"))


def test_submit_names_dependencies_and_ends_what_can_never_run():
    after = "--dependency=afterok:1.ctl,afterok:2.ctl,afterany:3.ctl"
    argv = ["sbatch", "--parsable", after, "--kill-on-invalid-dep=yes", "/r/job.sh"]
    assert DIALECT.submit_argv(AFTER, "/r/job.sh") == argv


def test_odd_log_path_is_an_argument_without_patterns():
    argv = DIALECT.submit_argv(request(log_path=ODD_PATH), "/r/job.sh")
    assert argv[2] == "--output=/scratch/my runs/it's #1 100%%j.log"


@pytest.mark.parametrize("stdout", ["12\n", "12;lab\n", "hello\nSubmitted batch job 12\n"])
def test_job_id_is_found(stdout):
    assert DIALECT.job_id(stdout) == "12"


def test_squeue_as_recorded():
    views = DIALECT.views(SQUEUE)
    assert {job: view.state for job, view in views.items()} == {
        "4": JobState.CANCELLED,
        "6": JobState.CANCELLED,
        "1": JobState.SUCCEEDED,
        "7": JobState.SUCCEEDED,
        "3": JobState.FAILED,
        "5": JobState.HELD,
        "12": JobState.PENDING,
        "18": JobState.ENDING,
        "17": JobState.RUNNING,
    }
    assert views["7"].nodes == ("n2", "n1")
    assert views["1"].nodes == ("n1", "n2")
    assert (views["12"].reason, views["12"].start_estimate) == ("PartitionNodeLimit", None)


def test_estimated_start_is_that_of_waiting_jobs_only():
    line = "squeue|1|{}|Resources|2026-11-21T13:22:02|\n"
    assert DIALECT.views(line.format("PENDING"))["1"].start_estimate == "2026-11-21T13:22:02"
    assert DIALECT.views(line.format("RUNNING"))["1"].start_estimate is None


def test_scontrol_as_recorded():
    views = DIALECT.views(SCONTROL)
    assert [(v.job_id, v.state, v.exit_code, v.nodes) for v in views.values()] == [
        ("3", JobState.FAILED, 7, ("n1",)),
        ("4", JobState.CANCELLED, None, ()),
        ("6", JobState.CANCELLED, 143, ("n1",)),
        ("1", JobState.SUCCEEDED, 0, ("n1", "n2")),
    ]


def test_scontrol_joins_the_components_of_a_job():
    line = "JobId={} HetJobId=7 HetJobOffset={} JobName=het JobState=RUNNING NodeList={}\n"
    (view,) = DIALECT.views(line.format(7, 0, "n2") + line.format(8, 1, "n1")).values()
    assert (view.job_id, view.nodes) == ("7", ("n2", "n1"))


def test_sacct_joins_the_components_of_a_job():
    views = DIALECT.views(SACCT)
    assert [(v.job_id, v.state, v.exit_code) for v in views.values()] == [
        ("21", JobState.SUCCEEDED, 0),
        ("22", JobState.CANCELLED, 143),
        ("23", JobState.OUT_OF_MEMORY, 253),
        ("24", JobState.TIMED_OUT, None),
        ("25", JobState.RUNNING, None),
    ]
    assert views["25"].nodes == ("n1", "n2")


def test_only_completed_is_a_success():
    words = [word for word, state in slurm.STATES.items() if state is JobState.SUCCEEDED]
    assert words == ["COMPLETED"]


def test_lines_of_others_are_left_out():
    assert DIALECT.views("slurm_load_jobs error: Invalid job id specified\n\n") == {}


def test_broken_node_list_is_an_error():
    with pytest.raises(EngineError, match="can't be read"):
        DIALECT.views("squeue|1|RUNNING|None|N/A|n[1-\n")


def test_status_forms_cover_sites_without_accounting():
    forms = DIALECT.status_argv(["1", "2"])
    assert [argv[0] for argv in forms] == ["squeue", "sacct", "scontrol"]
    assert DIALECT.status_argv(["1"])[2] == ["scontrol", "--oneliner", "show", "job", "1"]
    assert forms[2] == ["scontrol", "--oneliner", "show", "job"]


def test_agent_is_started_beside_other_steps_on_all_cpus():
    start = NodeStart(node="n2", command=("/bin/x", "y"), cpus=8, het_group=1)
    line = """
        srun --nodes=1 --ntasks=1 --overlap --mem=0 --cpu-bind=none --mpi=none
            --kill-on-bad-exit=0 --wait=0 --no-kill --input=none --unbuffered --export=ALL
            --nodelist=n2 --cpus-per-task=8 --het-group=1 -- /bin/x y
    """
    assert DIALECT.node_argv(start) == line.split()


def test_slurm_starts_nothing_by_pbsdsh():
    with pytest.raises(ValueError, match="Slurm can't start agents"):
        DIALECT.node_argv(NodeStart(node="n2", command=("/x",), launcher=NodeLauncher.PBSDSH))


def test_allocation_as_recorded():
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "MUSTER_JOB_ENDS_AT": "1795270870",
    }
    nodes = tuple(AllocatedNode(name=f"n{k + 1}", cpus=4, slot=k) for k in (0, 1))
    found = Allocation(job_id="1", nodes=nodes, ends_at=1795270870.0)
    assert DIALECT.allocation(job, open) == found


def test_allocation_of_a_heterogeneous_job():
    found = DIALECT.allocation(HET, open)
    assert found.job_id == "7"
    assert [(n.name, n.cpus, n.gpus, n.het_group, n.slot) for n in found.nodes] == [
        ("n2", 2, None, 0, 0),
        ("n1", 1, 4, 1, 1),
        ("n3", 1, 4, 1, 2),
    ]


def test_later_slurm_tells_the_end():
    job = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n1", "MUSTER_JOB_ENDS_AT": "1"}
    assert (
        DIALECT.allocation({**job, "SLURM_JOB_END_TIME": "1795270000"}, open).ends_at
        == 1795270000.0
    )


def test_broken_allocation_is_an_error():
    with pytest.raises(EngineError, match="can't be read"):
        DIALECT.allocation({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1"}, open)


def test_range_of_unequal_nodes_is_unmapped():
    job = request(chunks=(NodeChunk(num_nodes=2), NodeChunk(gpus=1)), min_nodes=2)
    assert DIALECT.unmapped(job)[0].startswith("nodes: 2 to 3 nodes of unequal kinds")
    assert DIALECT.unmapped(JOBS["range_of_nodes"]) == []


REFUSED = "sbatch: error: Batch job submission failed"
LIMITED = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("limit", "hint"),
    [
        ("QOSMaxSubmitJobPerUserLimit", "`squeue --me` lists yours"),
        ("AssocMaxSubmitJobLimit", "`squeue --me` lists yours"),
        ("QOSMaxCpuPerJobLimit", "ask for less"),
        ("MaxGRESRunMinsPerUser", "ask for less"),
        ("QOSMaxWallDurationPerJobLimit", "lower --time"),
    ],
)
def test_the_hint_fits_the_limit_that_sbatch_names_before_its_own_sentence(limit, hint):
    report = DIALECT.explain_refusal(f"sbatch: error: {limit}\n{REFUSED}: {LIMITED}\n")
    assert hint in report.hint


@pytest.mark.parametrize("refusal", slurm.REFUSALS, ids=lambda refusal: refusal.error)
def test_a_hint_names_the_option_of_run_beside_the_key_of_a_workflow(refusal):
    assert ("in a workflow" in refusal.hint) == bool(re.search("exec_timeout|gpu: 0", refusal.hint))
    assert "in a workflow" not in refusal.hint or "--" in refusal.hint.partition("(")[0]


@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        ("sbatch: error: invalid partition specified: nope", "no such partition"),
        ("Batch job submission failed: Requested node configuration is not available", "this much"),
        ("sbatch: error: Memory specification can not be satisfied", "this much"),
        ("sbatch: error: Temporary disk specification can not be satisfied", "this much"),
        ("Batch job submission failed: Invalid feature specification", "feature"),
        ("sbatch: error: Unable to open file /nonexist.sh", "can't read the job script"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "longer than"),
        ("Invalid account or account/partition combination specified", "does not let this"),
        ("Invalid qos specification", "does not let this"),
        ("Invalid generic resource (gres) specification", "no such GPU"),
        ("Unable to contact slurm controller (connect failure)", "does not answer"),
        (f"{REFUSED}: Socket timed out on send/recv operation", "did not answer in time"),
        (f"{REFUSED}: {LIMITED}", "beyond a limit of your account or QOS"),
        (f"{REFUSED}: Job's account not permitted to use this partition", "does not let this"),
        (f"{REFUSED}: Required partition not available (inactive or drain)", "takes no jobs now"),
        (f"{REFUSED}: Node count specification invalid", "this number of nodes"),
    ],
)
def test_refusal_is_explained(stderr, error):
    report = DIALECT.explain_refusal(stderr + "\n")
    assert error in report.error
    assert report.because == (stderr,)


# What scontrol 22.05 said of a node of a running job: before its power was cut, behind, and when it was back.
NODE = "NodeName=n1 Arch=x86_64 CoresPerSocket=4  CPUAlloc=1 NodeHostName=n1 RealMemory=8000 State={} ThreadsPerCore=1"
JOB = (
    "JobId=1 JobName=sbatch JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 ReqNodeList=(null)"
    " ExcNodeList=(null) NodeList={} BatchHost=n1 NumNodes=2"
)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (NODE.format("MIXED"), None),
        (NODE.format("MIXED+DRAIN"), None),
        (NODE.format("IDLE*"), None),  # it does not answer now: no more is known
        (NODE.format("ALLOCATED+NOT_RESPONDING"), None),
        (NODE.format("DOWN+NOT_RESPONDING"), "its state is DOWN"),
        (NODE.format("DOWN*"), "its state is DOWN"),
        (NODE.format("DOWN").replace("n1", "n2"), None),
        (JOB.format("n[1-2]"), None),
        (JOB.format("n2"), "it is no longer a node of the job"),
        (JOB.format("(null)").replace("RUNNING", "PENDING"), None),
        (JOB.format("n[2"), None),
        ("", None),
        ("slurm_load_node error: Unable to contact slurm controller", None),
    ],
)
def test_a_lost_node_is_one_that_slurm_calls_down_or_has_taken_from_the_job(said, words):
    assert DIALECT.lost_node.is_lost(said, "n1") == words


# Source: https://slurm.schedmd.com/job_reason_codes.html
EVERY_REASON = """
AccountingPolicy AccountNotAllowed AssocGrpBB AssocGrpCpuLimit AssocGrpCPUMinutesLimit
AssocGrpCPURunMinutesLimit AssocGrpGRES AssocGrpGRESMinutes AssocGrpJobsLimit AssocGrpMemLimit
AssocGrpNodeLimit AssocGrpSubmitJobsLimit AssocGrpWallLimit AssociationJobLimit
AssocMaxBBMinutesPerJob AssocMaxCpuPerJobLimit AssocMaxJobsLimit AssocMaxMemPerJob
AssocMaxNodePerJobLimit AssocMaxSubmitJobLimit AssocMaxWallDurationPerJobLimit BadConstraints
BeginTime BurstBufferOperation BurstBufferResources BurstBufferStageIn Cleaning DeadLine Dependency
DependencyNeverSatisfied FedJobLock FrontEndDown InvalidAccount InvalidQOS JobArrayTaskLimit
JobHeldAdmin JobHeldUser JobHoldMaxRequeue JobLaunchFailure Licenses MaxMemPerLimit NodeDown
NonZeroExitCode OutOfMemory PartitionConfig PartitionDown PartitionInactive PartitionNodeLimit
PartitionTimeLimit PowerNotAvail PowerReserved Priority Prolog QOSGrpCpuLimit QOSGrpGRES
QOSGrpJobsLimit QOSGrpMemLimit QOSGrpNodeLimit QOSGrpWallLimit QOSJobLimit QOSMaxCpuPerJobLimit
QOSMaxCpuPerUserLimit QOSMaxJobsPerUserLimit QOSMaxNodePerJobLimit QOSMaxSubmitJobPerUserLimit
QOSMaxWallDurationPerJobLimit QOSMinCpuNotSatisfied QOSMinGRES QOSNotAllowed QOSResourceLimit
QOSTimeLimit QOSUsageThreshold ReqNodeNotAvail Reservation ReservationDeleted Resources
SystemFailure
"""


def waiting(reason, state=JobState.PENDING):
    return JobView(job_id="5", state=state, reason=reason)


@pytest.mark.parametrize(
    "reason", [*EVERY_REASON.split(), "ReqNodeNotAvail, UnavailableNodes:n[1-2]"]
)
def test_every_reason_of_slurm_is_a_sentence(reason):
    assert slurm.REASONS.explained(waiting(reason)).wait is not None


def test_a_reason_is_not_taken_for_another_that_begins_likewise():
    explain = slurm.REASONS.explained
    assert explain(waiting("Reservation")).wait != explain(waiting("ReservationDeleted")).wait
    assert explain(waiting("Dependency")).wait.never is False
    assert explain(waiting("DependencyNeverSatisfied")).wait.never is True


def test_an_unknown_reason_and_a_job_that_runs_stay_as_they_are():
    for view in (waiting("SomethingNew"), waiting("Priority", JobState.RUNNING), waiting(None)):
        assert slurm.REASONS.explained(view) == view


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # Of Slurm 22.05 and 24.11, with accounts, a prolog that fails, and `scontrol suspend`.
        (
            "PENDING|Job's account not permitted to use this partition (high allows root not other)|N/A|",
            "job 5 is pending: its account may not use this partition (",
        ),
        (
            "PENDING|launch failed requeued held|N/A|",
            "job 5 is pending: a node could not start it, as when its prologue fails: it is back in the queue, held (",
        ),
        ("SUSPENDED|None|N/A|n1", "job 5 is suspended on n1"),
        ("RUNNING|Prolog|2026-11-21T13:22:02|n1", "job 5 is running on n1"),
        ("RUNNING|BeginTime|2026-11-21T13:22:02|n1", "job 5 is running on n1"),
    ],
)
def test_what_a_job_waits_for_is_said_only_while_it_waits(line, words):
    view = DIALECT.views(f"squeue|5|{line}\n")["5"]
    assert describe_job(slurm.REASONS.explained(view)).startswith(words)


def test_a_wait_is_told_with_its_meaning_the_schedulers_word_and_a_hint():
    view = slurm.REASONS.explained(waiting("JobHeldUser", JobState.HELD))

    said = "job 5 is held: you have held it (JobHeldUser); `scontrol release JOB` releases it"
    assert describe_job(view) == said


WAITING_JOB = "JobId=5 JobName=x JobState=PENDING Reason=PartitionNodeLimit Partition=main NumNodes={} MinCPUsNode={}"


@pytest.mark.parametrize(
    ("nodes", "cpus", "sinfo", "said"),
    [
        ("9-9", 1, "main*|3|8\n", "partition main has 3 nodes of 8 CPUs; the job asks for 9 nodes"),
        ("2", 16, "main*|3|8\n", "partition main has 3 nodes of 8 CPUs; the job asks for 2 nodes of at least 16 CPUs"),
        ("3-3", 12, "main|2|16\nmain|4|8\nbig|9|64\n", "partition main has 2 nodes of 16 CPUs and 4 nodes of 8 CPUs; the job asks for 3 nodes of at least 12 CPUs"),
        ("3-3", 8, "main|2|16\nmain|4|8\n", None),  # large enough: nodes may be down
        ("1-9", 8, "main|2|16\n", None),  # the least that will do is there
        ("9", 1, "", None),  # nobody told
    ],
)  # fmt: skip
def test_a_partition_is_too_small_only_where_that_is_proven(nodes, cpus, sinfo, said):
    assert slurm.shortage([WAITING_JOB.format(nodes, cpus), sinfo, ""]) == said


PARTITION = (
    "PartitionName=big AllowGroups=ALL MaxNodes=1 MaxTime=00:01:00 State=UP\n"
    "PartitionName=main AllowGroups=ALL DefaultTime=NONE MaxNodes={} MaxTime={} State=UP\n"
)


@pytest.mark.parametrize(
    ("limit", "nodes", "most_nodes", "most_time", "said"),
    [
        ("02:00:00", 1, "UNLIMITED", "01:00:00", "partition main allows 01:00:00; the job asks for 02:00:00"),
        ("2-00:00:00", 1, "UNLIMITED", "1-00:00:00", "partition main allows 1-00:00:00; the job asks for 2-00:00:00"),
        ("01:00:00", 3, "2", "01:00:00", "partition main allows a job 2 nodes; it asks for 3"),
        ("01:00:00", 2, "2", "UNLIMITED", None),
        ("UNLIMITED", 2, "2", "01:00:00", None),  # Slurm gives it the partition's
    ],
)  # fmt: skip
def test_the_limits_of_a_partition_prove_that_a_job_never_starts(
    limit, nodes, most_nodes, most_time, said
):
    job = f"{WAITING_JOB.format(nodes, 1)} TimeLimit={limit}"
    answers = [job, "main*|30|8\n", PARTITION.format(most_nodes, most_time)]
    assert slurm.shortage(answers) == said


# Recorded from Slurm 22.05, `GraceTime=20`, before and in the grace, and after the requeue.
RUNS = "JobId=1 JobState=RUNNING Reason=None StartTime=2026-11-27T23:53:01 EndTime=2027-11-27T23:53:01 PreemptEligibleTime=2026-11-27T23:53:01 PreemptTime=None"
GRACE = "JobId=1 JobState=RUNNING Reason=None StartTime=2026-11-27T23:53:01 EndTime=2026-11-27T23:53:22 PreemptEligibleTime=2026-11-27T23:53:01 PreemptTime=2026-11-27T23:53:02"
BEHIND = "JobId=1 JobState=COMPLETING Reason=None Requeue=1 Restarts=1 StartTime=2026-11-27T23:53:24 EndTime=Unknown SuspendTime=None"


UNLIMITED = "JobId=5 JobState=RUNNING Reason=None TimeLimit=UNLIMITED StartTime=2026-11-28T13:16:56 EndTime=Unknown PreemptEligibleTime=2026-11-28T13:16:56 PreemptTime=2026-11-28T13:16:58"
UNLIMITED_RUNS = UNLIMITED.replace("PreemptTime=2026-11-28T13:16:58", "PreemptTime=None")


@pytest.mark.parametrize(
    ("said", "grace_s"),
    [
        (RUNS, None),
        (GRACE, 20.0),
        (BEHIND, None),
        (UNLIMITED, math.inf),
        (UNLIMITED_RUNS, None),
        ("", None),
    ],
)
def test_the_grace_of_a_job_that_slurm_preempts(said, grace_s):
    assert slurm.PREEMPTION.grace_s(said) == grace_s


# Recorded from Slurm 22.05, shortened.
PARTITIONS = "PartitionName=main AllowGroups=ALL OverSubscribe=NO PreemptMode={} State=UP\nPartitionName=urgent PreemptMode=OFF State=UP"


@pytest.mark.parametrize(
    ("job", "mode", "is_the_end"),
    [
        ("JobId=1 Requeue=1 Partition=main", "CANCEL", True),
        ("JobId=1 Requeue=1 Partition=main", "REQUEUE", False),
        ("JobId=1 Requeue=1 Partition=urgent", "CANCEL", False),
        ("JobId=1 Requeue=0 Partition=main", "REQUEUE", True),
        ("", "CANCEL", False),
    ],
)
def test_whether_slurm_starts_a_preempted_job_again(job, mode, is_the_end):
    assert slurm.PREEMPTION.is_the_end(job, PARTITIONS.format(mode)) is is_the_end


@pytest.mark.parametrize(
    ("line", "is_gone"),
    [
        ("srun: error: Node failure on n4", True),
        ("srun: error: Unable to create step for job 7: Requested node configuration is not available", True),
        ("srun: error: slurm_receive_msgs: [[n4]:6818] failed: Zero Bytes were transmitted or received", False),
    ],
)  # fmt: skip
def test_what_srun_says_of_a_node_that_is_out_of_the_job(line, is_gone):
    assert bool(re.search(slurm.REASONS.gone, line)) is is_gone
