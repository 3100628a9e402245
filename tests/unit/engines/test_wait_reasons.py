import pytest

from torchmuster.engines import pbs_reasons, slurm_reasons
from torchmuster.engines.registry import load_dialect
from torchmuster.engines.wait_reasons import reasons_of
from torchmuster.model.job import JobView, describe_job
from torchmuster.model.states import JobState

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
    assert slurm_reasons.shortage([JOB.format(nodes, cpus), sinfo]) == said


def test_the_hosts_of_pbs_are_counted_by_their_cpus():
    text = "n1\n     resources_available.ncpus = 2\nn2\n     resources_available.ncpus = 2\nbig\n     resources_available.ncpus = 8\n"

    assert pbs_reasons.shortage([text]) == "this PBS has 1 host of 8 CPUs and 2 hosts of 2 CPUs"
    assert pbs_reasons.shortage([""]) is None
