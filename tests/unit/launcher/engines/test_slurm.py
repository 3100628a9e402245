"""Scripts word for word, and answers recorded from Slurm 22.05.8 with two nodes."""

import re

import pytest
from tests.unit.launcher.model.jobs import AFTER, JOBS, ODD_PATH, request

from torchmuster.errors import UsageError
from torchmuster.launcher.engines import slurm
from torchmuster.launcher.engines.base import EngineError, NodeStart
from torchmuster.launcher.engines.slurm import DIALECT, REASONS, REFUSALS, STATES
from torchmuster.launcher.model.job import (
    AllocatedNode,
    JobState,
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
    assert describe_job(REASONS.explained(view)).startswith(words)


@pytest.mark.parametrize("name", JOBS)
def test_whole_script(name, golden):
    golden("scripts/slurm.txt", name, DIALECT.script(JOBS[name]))


def test_site_key_takes_the_place_of_ours():
    chunk = NodeChunk(gpus=4, extra=(("gpus-per-node", "a100:4"),))
    script = DIALECT.script(request(chunks=(chunk,), directives=("#SBATCH --mem=0",)))
    assert script.count("gpus-per-node") == 1
    assert "#SBATCH --gpus-per-node=a100:4\n" in script


def test_site_line_takes_the_place_of_ours():
    script = DIALECT.script(request(directives=("#SBATCH --mem=0",)))
    assert [line for line in script.splitlines() if "--mem" in line] == ["#SBATCH --mem=0"]


def test_backslash_in_the_log_path_is_refused():
    with pytest.raises(UsageError, match="backslash"):
        DIALECT.script(request(log_path="/a\\b"))


def test_submit_names_dependencies_and_ends_what_can_never_run():
    assert DIALECT.submit_argv(AFTER, "/r/job.sh") == [
        "sbatch",
        "--parsable",
        "--dependency=afterok:1.ctl,afterok:2.ctl,afterany:3.ctl",
        "--kill-on-invalid-dep=yes",
        "/r/job.sh",
    ]


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
    assert [word for word, state in STATES.items() if state is JobState.SUCCEEDED] == ["COMPLETED"]


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
    assert DIALECT.node_argv(start) == [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--no-kill",
        "--input=none",
        "--unbuffered",
        "--export=ALL",
        "--nodelist=n2",
        "--cpus-per-task=8",
        "--het-group=1",
        "--",
        "/bin/x",
        "y",
    ]


def test_slurm_starts_nothing_by_pbsdsh():
    with pytest.raises(ValueError, match="Slurm can't start agents"):
        DIALECT.node_argv(NodeStart(node="n2", command=("/x",), launcher=NodeLauncher.PBSDSH))


def test_allocation_as_recorded():
    found = DIALECT.allocation(
        {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
            "SLURM_TASKS_PER_NODE": "1(x2)",
            "MUSTER_JOB_ENDS_AT": "1795270870",
        },
        open,
    )
    assert found.nodes == (
        AllocatedNode(name="n1", cpus=4, slot=0),
        AllocatedNode(name="n2", cpus=4, slot=1),
    )
    assert (found.job_id, found.ends_at) == ("1", 1795270870.0)


def test_allocation_of_a_heterogeneous_job():
    found = DIALECT.allocation(HET, open)
    assert found.job_id == "7"
    assert [(n.name, n.cpus, n.gpus, n.het_group, n.slot) for n in found.nodes] == [
        ("n2", 2, None, 0, 0),
        ("n1", 1, 4, 1, 1),
        ("n3", 1, 4, 1, 2),
    ]


def test_later_slurm_tells_the_end():
    found = DIALECT.allocation(
        {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_END_TIME": "1795270000"}
        | {"MUSTER_JOB_ENDS_AT": "1"},
        open,
    )
    assert found.ends_at == 1795270000.0


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


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.error)
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
    assert slurm.DIALECT.lost_node.is_lost(said, "n1") == words
