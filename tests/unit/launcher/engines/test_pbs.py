"""Scripts word for word, and answers recorded from OpenPBS 23.06.06 with two hosts."""

import json
from pathlib import Path

import pytest
from tests.unit.launcher.model.jobs import AFTER, JOBS, ODD_PATH, request

from torchmuster.errors import UsageError
from torchmuster.launcher.engines.base import EngineError, NodeStart
from torchmuster.launcher.engines.pbs import DIALECT
from torchmuster.launcher.model.job import AllocatedNode, JobState, NodeChunk, NodeLauncher

RUNNING = {
    "Job_Name": "okjob",
    "job_state": "R",
    "exec_host": "n1/0*2+n2/0*2",
    "exec_vnode": "(n1:ncpus=2:ngpus=1)+(n2:ncpus=2:ngpus=1)",
    "substate": 41,
    "run_count": 1,
    "comment": "Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2:ngpus=1)+(n2:ncpus=2:ngpus=1)",
}
RUN = "Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2)"
# What happened, fields, state, exit code: the recorded table.
RECORDED = {
    "held": ({"job_state": "H", "substate": 20}, JobState.HELD, None),
    "exit_0": (
        {"job_state": "F", "substate": 92, "Exit_status": 0, "comment": f"{RUN} and finished"},
        JobState.SUCCEEDED,
        0,
    ),
    "exit_7": (
        {"job_state": "F", "substate": 93, "Exit_status": 7, "comment": f"{RUN} and failed"},
        JobState.FAILED,
        7,
    ),
    "over_walltime": (
        {
            "job_state": "F",
            "substate": 93,
            "Exit_status": -29,
            "comment": f"{RUN} and exceeded resource walltime",
        },
        JobState.TIMED_OUT,
        None,
    ),
    "qdel": (
        {"job_state": "F", "Exit_status": 0, "comment": f"{RUN} and terminated by lab@ctl"},
        JobState.CANCELLED,
        0,
    ),
    "dependency_failed": ({"job_state": "F", "substate": 92}, JobState.CANCELLED, None),
    "can_never_run": (
        {"job_state": "Q", "comment": "Can Never Run: Not enough total nodes available"},
        JobState.PENDING,
        None,
    ),
}


def view(**fields):
    return DIALECT.views(json.dumps({"Jobs": {"1.ctl": fields}}))["1.ctl"]


@pytest.mark.parametrize("name", [name for name in JOBS if name != "everything"])
def test_whole_script(name, golden):
    golden("scripts/pbs.txt", name, DIALECT.script(JOBS[name]))


def test_whole_script_with_everything(golden):
    job = request(
        name="7 days' run",
        time_limit_s=3601,
        queue="gpu",
        account="proj-1",
        directives=("-l place=excl", "-P climate", "-W sandbox=PRIVATE"),
        setup=("module load cuda/12.6",),
        requeue=False,
    )
    golden("scripts/pbs.txt", "everything", DIALECT.script(job))


def test_submit_names_dependencies_by_kind():
    want = ["qsub", "-W", "depend=afterok:1.ctl:2.ctl,afterany:3.ctl", "/r/job.sh"]
    assert DIALECT.submit_argv(AFTER, "/r/job.sh") == want


def test_odd_log_path_is_an_argument():
    argv = DIALECT.submit_argv(request(log_path=ODD_PATH), "/r/job.sh")
    assert argv == ["qsub", "-o", ODD_PATH, "/r/job.sh"]


def test_colon_in_the_log_path_is_refused():
    with pytest.raises(UsageError, match="as a host"):
        DIALECT.script(request(log_path="/runs/a:b"))


@pytest.mark.parametrize("value", ["a:b", "a+b", "a=b", "a,b"])
def test_site_key_that_would_begin_another_chunk_is_refused(value):
    with pytest.raises(UsageError):
        DIALECT.script(request(chunks=(NodeChunk(extra=(("key", value),)),)))


@pytest.mark.parametrize(
    ("stdout", "job_id"),
    [("0.ctl\n", "0.ctl"), ("project: ok\n6.ctl\n", "6.ctl"), ("12[].pbs-1\n", "12[].pbs-1")],
)
def test_job_id_is_found(stdout, job_id):
    assert DIALECT.job_id(stdout) == job_id


def test_running_job_as_recorded():
    found = view(**RUNNING)
    assert (found.state, found.nodes, found.exit_code) == (JobState.RUNNING, ("n1", "n2"), None)
    assert found.reason == RUNNING["comment"]


@pytest.mark.parametrize("name", RECORDED)
def test_end_as_recorded(name):
    fields, state, code = RECORDED[name]
    found = view(**fields)
    assert (found.state, found.exit_code) == (state, code)


def test_job_that_never_ran_says_why():
    assert "a job that it waits for failed" in view(job_state="F", substate=92).reason


def test_reason_of_a_job_that_can_never_run_is_kept():
    assert view(**RECORDED["can_never_run"][0]).reason.startswith("Can Never Run")


def test_held_job_names_what_it_waits_for():
    assert view(job_state="H", depend="afterok:1.ctl@ctl").reason == "waits: afterok:1.ctl@ctl"


def test_reason_that_pbs_gives_is_better_than_ours():
    found = view(job_state="H", depend="afterok:1.ctl@ctl", comment="held by its owner")
    assert found.reason == "held by its owner"


def test_estimated_start_is_that_of_waiting_jobs_only():
    estimated = {"estimated": {"start_time": "Sat Nov 21 14:00:00 2026"}}
    assert view(job_state="Q", **estimated).start_estimate == "Sat Nov 21 14:00:00 2026"
    assert view(job_state="R", **estimated).start_estimate is None


def test_signal_is_told_as_a_shell_does():
    assert view(job_state="F", Exit_status=265).exit_code == 137


def test_kill_for_memory_is_out_of_memory():
    assert view(job_state="F", Exit_status=-27).state is JobState.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "stdout",
    [
        "qstat: Unknown Job Id 999.ctl",
        "[1]",
        '{"Jobs": [1]}',
        '{"Jobs": {"1": 2}}',
        '{"Jobs": {"1": {"job_state": "F", "Exit_status": "x"}}}',
        "[" * 100000,
    ],
)
def test_answer_that_is_no_job_is_an_error(stdout):
    with pytest.raises(EngineError, match="can't be read"):
        DIALECT.views(stdout)


def test_status_covers_servers_without_job_history_or_without_json():
    assert DIALECT.status_argv(["1.ctl", "2.ctl"]) == [
        ["qstat", "-x", "-f", "-F", "json", "1.ctl", "2.ctl"],
        ["qstat", "-f", "-F", "json", "1.ctl", "2.ctl"],
        ["qstat", "-x", "-f", "1.ctl", "2.ctl"],
        ["qstat", "-f", "1.ctl", "2.ctl"],
    ]


def test_cancel():
    assert DIALECT.cancel_argv("1.ctl") == ["qdel", "1.ctl"]


@pytest.mark.parametrize(
    ("way", "argv"),
    [
        (None, ["pbsdsh", "-n", "2", "--", "/bin/x", "a b"]),
        (NodeLauncher.TMRSH, ["pbs_tmrsh", "n2", "/bin/x", "a b"]),
        (NodeLauncher.MPIEXEC, ["mpiexec", "-n", "1", "-host", "n2", "/bin/x", "a b"]),
        (NodeLauncher.SSH, ["ssh", "-o", "BatchMode=yes", "n2", "/bin/x 'a b'"]),
    ],
)
def test_agent_is_started_on_another_host(way, argv):
    start = NodeStart(node="n2", slot=2, command=("/bin/x", "a b"), launcher=way)
    assert DIALECT.node_argv(start) == argv


def test_pbs_starts_nothing_by_srun():
    with pytest.raises(ValueError, match="PBS can't start agents"):
        DIALECT.node_argv(NodeStart(node="n2", command=("/x",), launcher=NodeLauncher.SRUN))


@pytest.mark.parametrize("node", ["-oProxyCommand=x", "n1,n2", "", "n 1"])
def test_name_that_is_an_option_or_a_list_is_refused(node):
    with pytest.raises(ValueError, match="not a valid name of a node"):
        DIALECT.node_argv(NodeStart(node=node, command=("/x",), launcher=NodeLauncher.SSH))


def test_hosts_are_the_unique_lines_of_the_node_file(tmp_path):
    nodefile = tmp_path / "9.ctl"
    nodefile.write_text("n2\nn2\nn10\nn10\n")
    found = DIALECT.allocation(
        {
            "PBS_JOBID": "9.ctl",
            "PBS_NODEFILE": str(nodefile),
            "NCPUS": "4",
            "MUSTER_JOB_ENDS_AT": "1795270870",
        },
        lambda path: Path(path).read_text(),
    )
    assert found.nodes == (
        AllocatedNode(name="n2", slot=0),
        AllocatedNode(name="n10", slot=2),
    )
    assert (found.job_id, found.ends_at) == ("9.ctl", 1795270870.0)


def test_cpus_of_a_lone_host_are_known():
    environment = {"PBS_JOBID": "9.ctl", "PBS_NODEFILE": "x", "NCPUS": "4"}
    assert DIALECT.allocation(environment, lambda path: "n1\n").nodes[0].cpus == 4


def test_node_file_that_only_the_first_host_has_is_an_error(tmp_path):
    environment = {"PBS_JOBID": "9.ctl", "PBS_NODEFILE": str(tmp_path / "none")}
    with pytest.raises(EngineError) as caught:
        DIALECT.allocation(environment, lambda path: Path(path).read_text())
    assert "first host only" in caught.value.why


def test_what_qsub_cannot_be_told_is_named_by_its_key():
    job = request(
        chunks=(NodeChunk(num_nodes=4, storage_bytes=1),),
        nodes_excluded=("n3",),
        constraint="ib",
        qos="high",
        min_nodes=2,
        warn_s=60,
    )
    keys = [sentence.partition(":")[0] for sentence in DIALECT.unmapped(job)]
    assert keys == ["storage", "nodesExcluded", "constraint", "qos", "nodes", "warn_s"]


def test_end_is_known_to_the_head_where_there_is_a_time_limit():
    assert DIALECT.unmapped(request(warn_s=60, time_limit_s=600)) == []


@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        ("qsub: Unknown queue", "no such queue"),
        ("qsub: Illegal attribute or resource value", "one of the resources"),
        ("qsub: Illegal attribute or resource value Resource_List.walltime", "time limit"),
        ("qsub: script file:: No such file or directory", "can't read the job script"),
        ("qsub: Job exceeds queue and/or server resource limits", "more than the queue allows"),
        ("qsub: Unauthorized Request", "does not let you"),
    ],
)
def test_refusal_is_explained(stderr, error):
    report = DIALECT.explain_refusal(stderr + "\n")
    assert error in report.error
    assert report.because == (stderr,)


@pytest.mark.parametrize("outlives", [True, False])
def test_only_a_run_that_goes_on_without_a_node_asks_pbs_to_keep_the_job(outlives):
    script = DIALECT.script(request(outlives_nodes=outlives))
    assert ("#PBS -W tolerate_node_failures=all\n" in script) is outlives
