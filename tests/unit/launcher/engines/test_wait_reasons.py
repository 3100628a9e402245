import math
import re

import pytest

from torchmuster.launcher.engines import pbs as pbs_reasons
from torchmuster.launcher.engines import slurm as slurm_reasons
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.engines.wait_reasons import reasons_of
from torchmuster.launcher.model.job import JobState, JobView, describe_job

# Source: https://slurm.schedmd.com/job_reason_codes.html
SLURM = """
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
PBS = [
    "Can Never Run: Not enough total nodes available",  # recorded
    "Not Running: Queue not started.",  # recorded
    "Not Running: Insufficient amount of resource: ncpus",
    "Not Running: Not enough free nodes available",
    "Not Running: User has reached queue workq running job limit.",
    "Not Running: Job would conflict with reservation or top job",
    "Job held by lab on Sat Nov 21 at 22:56",
    "waits: afterok:1028.ctl@ctl",
]


def waiting(reason, state=JobState.PENDING):
    return JobView(job_id="5", state=state, reason=reason)


@pytest.mark.parametrize("reason", [*SLURM.split(), "ReqNodeNotAvail, UnavailableNodes:n[1-2]"])
def test_every_reason_of_slurm_is_a_sentence(reason):
    assert slurm_reasons.REASONS.explained(waiting(reason)).wait is not None


@pytest.mark.parametrize("reason", PBS)
def test_what_pbs_writes_into_a_comment_is_a_sentence(reason):
    assert pbs_reasons.REASONS.explained(waiting(reason)).wait is not None


def test_a_reason_is_not_taken_for_another_that_begins_likewise():
    explain = slurm_reasons.REASONS.explained
    assert explain(waiting("Reservation")).wait != explain(waiting("ReservationDeleted")).wait
    assert explain(waiting("Dependency")).wait.never is False
    assert explain(waiting("DependencyNeverSatisfied")).wait.never is True


def test_an_unknown_reason_and_a_job_that_runs_stay_as_they_are():
    for view in (waiting("SomethingNew"), waiting("Priority", JobState.RUNNING), waiting(None)):
        assert slurm_reasons.REASONS.explained(view) == view


def test_a_wait_is_told_with_its_meaning_the_schedulers_word_and_a_hint():
    view = slurm_reasons.REASONS.explained(waiting("JobHeldUser", JobState.HELD))

    said = "job 5 is held: you have held it (JobHeldUser); `scontrol release JOB` releases it"
    assert describe_job(view) == said


@pytest.mark.parametrize("name", ["slurm", "pbs"])
def test_every_engine_of_ours_has_a_table(name):
    assert reasons_of(load_dialect(name)) is not None


JOB = "JobId=5 JobName=x JobState=PENDING Reason=PartitionNodeLimit Partition=main NumNodes={} MinCPUsNode={}"


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
    assert slurm_reasons.shortage([JOB.format(nodes, cpus), sinfo, ""]) == said


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
    job = f"{JOB.format(nodes, 1)} TimeLimit={limit}"
    answers = [job, "main*|30|8\n", PARTITION.format(most_nodes, most_time)]
    assert slurm_reasons.shortage(answers) == said


HOLDS_AFTER_20 = "job held, too many failed attempts to run"  # as PBS 23.06.06 writes it


def test_a_job_that_pbs_could_not_start_is_not_one_that_a_user_holds():
    wait = pbs_reasons.REASONS.explained(waiting(HOLDS_AFTER_20, JobState.HELD)).wait
    assert wait.never
    assert "qrls" not in wait.hint


def test_more_cpus_than_a_host_has_are_proven_by_its_hosts():
    hosts = "n1\n     resources_available.ncpus = 8\nn2\n     resources_available.ncpus = 8\n"
    job = '{{"Resource_List": {{"ncpus": 9, "select": "{}", "place": "scatter"}}}}'
    said = "this PBS has 2 hosts of 8 CPUs; the job asks for 9 on one host"
    assert pbs_reasons.shortage([job.format("1:ncpus=1+2:ncpus=9:mpiprocs=1"), hosts]) == said
    assert pbs_reasons.shortage([job.format("9:ncpus=8"), hosts]) is None  # on hosts, in turn
    vnodes = "n1[0]\n     resources_available.host = n1\n     resources_available.ncpus = 8\n"
    both = vnodes + vnodes.replace("[0]", "[1]")
    assert pbs_reasons.shortage([job.format("1:ncpus=9"), both]) is None


def test_the_hosts_of_pbs_are_counted_by_their_cpus():
    text = "n1\n     resources_available.ncpus = 2\nn2\n     resources_available.ncpus = 2\nbig\n     resources_available.ncpus = 8\n"

    job = '"comment": "Can Never Run: Not enough total nodes available"'
    said = "this PBS has 1 host of 8 CPUs and 2 hosts of 2 CPUs"
    assert pbs_reasons.shortage([job, text]) == said
    assert pbs_reasons.shortage([job, ""]) is None


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
    assert slurm_reasons.PREEMPTION.grace_s(said) == grace_s


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
    assert slurm_reasons.PREEMPTION.is_the_end(job, PARTITIONS.format(mode)) is is_the_end


@pytest.mark.parametrize(
    ("line", "is_gone"),
    [
        ("srun: error: Node failure on n4", True),
        ("srun: error: Unable to create step for job 7: Requested node configuration is not available", True),
        ("srun: error: slurm_receive_msgs: [[n4]:6818] failed: Zero Bytes were transmitted or received", False),
    ],
)  # fmt: skip
def test_what_srun_says_of_a_node_that_is_out_of_the_job(line, is_gone):
    assert bool(re.search(slurm_reasons.REASONS.gone, line)) is is_gone
