"""Scripts of PBS word for word, and every answer that was recorded from a real OpenPBS 23.06.06 with two hosts."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.launcher.model.jobs import AFTER, JOBS, ODD_PATH, request

from torchmuster.core.model.states import JobState
from torchmuster.errors import UsageError
from torchmuster.launcher.engines.base import EngineError, NodeStart
from torchmuster.launcher.engines.pbs import DIALECT, read_jobs, view_of
from torchmuster.launcher.model.job import AllocatedNode, NodeChunk, NodeLauncher

RUNNING = {
    "Job_Name": "okjob",
    "job_state": "R",
    "exec_host": "n1/0*2+n2/0*2",
    "exec_vnode": "(n1:ncpus=2:ngpus=1)+(n2:ncpus=2:ngpus=1)",
    "substate": 41,
    "run_count": 1,
    "comment": "Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2:ngpus=1)+(n2:ncpus=2:ngpus=1)",
}
RUN_ON_ONE = "Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2)"
# What happened, fields, state, exit code: the recorded table.
RECORDED = {
    "held": ({"job_state": "H", "substate": 20}, JobState.HELD, None),
    "exit_0": (
        {
            "job_state": "F",
            "substate": 92,
            "Exit_status": 0,
            "comment": f"{RUN_ON_ONE} and finished",
        },
        JobState.SUCCEEDED,
        0,
    ),
    "exit_7": (
        {"job_state": "F", "substate": 93, "Exit_status": 7, "comment": f"{RUN_ON_ONE} and failed"},
        JobState.FAILED,
        7,
    ),
    "over_walltime": (
        {
            "job_state": "F",
            "substate": 93,
            "Exit_status": -29,
            "comment": f"{RUN_ON_ONE} and exceeded resource walltime",
        },
        JobState.TIMED_OUT,
        None,
    ),
    "qdel": (
        {"job_state": "F", "Exit_status": 0, "comment": f"{RUN_ON_ONE} and terminated by lab@ctl"},
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


RUN = "Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2:ngpus=1)+(n2:ncpus=2:ngpus=1)"
# `qstat -x -f -F json`, whole.
ANSWER = (
    '{ "timestamp": 1795170486, "pbs_version": "23.06.06", "pbs_server": "ctl",\n'
    '  "Jobs": { "1.ctl": {\n'
    '    "Job_Name": "okjob", "Job_Owner": "lab@ctl", "job_state": "R", "queue": "workq",\n'
    '    "Error_Path": "ctl:/home/lab/okjob.e1", "Join_Path": "oe", "Keep_Files": "n",\n'
    '    "exec_host": "n1/0*2+n2/0*2", "exec_vnode": "(n1:ncpus=2:ngpus=1)+(n2:ncpus=2:ngpus=1)",\n'
    '    "Resource_List": { "mpiprocs": 2, "ncpus": 4, "ngpus": 2, "nodect": 2, "place": "scatter",\n'
    '      "select": "2:ncpus=2:mpiprocs=1:ngpus=1", "walltime": "00:02:00" },\n'
    '    "substate": 41, "run_count": 1, "Rerunable": "True",\n'
    f'    "comment": "{RUN}" }} }} }}\n'
)
# What happened; the fields; state, exit code, reason.
STATES = {
    "running, substate 41": (
        {"job_state": "R", "substate": 41, "comment": RUN},
        (JobState.RUNNING, None, RUN),
    ),
    "running, substate 42": (
        {"job_state": "R", "substate": 42, "comment": RUN},
        (JobState.RUNNING, None, RUN),
    ),
    "held by the user": ({"job_state": "H", "substate": 20}, (JobState.HELD, None, None)),
    "held by a dependency": (
        {"job_state": "H", "substate": 20, "depend": "afterok:1.ctl@ctl"},
        (JobState.HELD, None, "waits: afterok:1.ctl@ctl"),
    ),
    "exit 0": (
        {"job_state": "F", "substate": 92, "Exit_status": 0, "comment": f"{RUN} and finished"},
        (JobState.SUCCEEDED, 0, f"{RUN} and finished"),
    ),
    "exit 7": (
        {"job_state": "F", "substate": 93, "Exit_status": 7, "comment": f"{RUN} and failed"},
        (JobState.FAILED, 7, f"{RUN} and failed"),
    ),
    "over its walltime": (
        {
            "job_state": "F",
            "substate": 93,
            "Exit_status": -29,
            "comment": f"{RUN} and exceeded resource walltime",
        },
        (JobState.TIMED_OUT, None, f"{RUN} and exceeded resource walltime"),
    ),
    "qdel while running": (
        {"job_state": "F", "Exit_status": 271, "comment": f"{RUN} and terminated by lab@ctl"},
        (JobState.CANCELLED, 143, f"{RUN} and terminated by lab@ctl"),
    ),
    "qdel while running, after a restart of the server, which loses the comment": (
        {"job_state": "F", "substate": 91, "Exit_status": 271},
        (JobState.CANCELLED, 143, None),
    ),
    "exit 0 after a restart of the server": (
        {"job_state": "F", "substate": 92, "Exit_status": 0},
        (JobState.SUCCEEDED, 0, None),
    ),
    "killed since a lost host came back": (
        {"job_state": "F", "substate": 93, "Exit_status": 271, "comment": RUN},
        (JobState.FAILED, 143, RUN),
    ),
    "afterok of a job that failed": (
        {"job_state": "F", "substate": 92},
        (
            JobState.CANCELLED,
            None,
            "it never ran: it was deleted, or a job that it waits for failed",
        ),
    ),
    "more hosts than there are": (
        {"job_state": "Q", "comment": "Can Never Run: Not enough total nodes available"},
        (JobState.PENDING, None, "Can Never Run: Not enough total nodes available"),
    ),
}
REFUSALS = {
    "qsub: Unknown queue": "PBS knows no such queue",
    "qsub: Queue is not enabled": "the queue is closed: it takes no jobs now",
    "qsub: Job violates queue and/or server resource limits": "the job asks for more than the queue allows",
    "qsub: Unknown resource: foo": "PBS knows no such resource",
    "qsub: Illegal attribute or resource value": "PBS does not take one of the resources",
    "qsub: Illegal attribute or resource value Resource_List.walltime": (
        "PBS does not take this time limit"
    ),
    "qsub: script file:: No such file or directory": "qsub can't read the job script",
}
# What a process finds that pbsdsh has started on the second host.
TASK = {
    "PATH": "/bin:/usr/bin",
    "PBS_NODENUM": "1",
    "PBS_TASKNUM": "2",
    "PBS_JOBID": "9.ctl",
    "PBS_O_WORKDIR": "/home/lab",
    "TMPDIR": "/var/tmp/pbs.9.ctl",
    "OMP_NUM_THREADS": "4",
    "NCPUS": "4",
}


@pytest.mark.parametrize("stdout", ["0.ctl\n", "6.ctl\n"])
def test_number_that_qsub_prints_is_the_job(stdout):
    assert DIALECT.job_id(stdout) == stdout.strip()


@pytest.mark.parametrize("stderr", REFUSALS)
def test_refusal_of_qsub_is_explained_and_kept(stderr):
    report = DIALECT.explain_refusal(f"{stderr}\n")
    assert (report.error, report.because) == (REFUSALS[stderr], (stderr,))


@pytest.mark.parametrize("name", STATES)
def test_state_of_a_job(name):
    fields, want = STATES[name]
    found = DIALECT.views(json.dumps({"Jobs": {"1.ctl": fields}}))["1.ctl"]
    assert (found.state, found.exit_code, found.reason) == want


def test_whole_answer_of_qstat():
    found = DIALECT.views(ANSWER)
    assert list(found) == ["1.ctl"]
    assert (found["1.ctl"].state, found["1.ctl"].nodes) == (JobState.RUNNING, ("n1", "n2"))


def test_job_that_has_not_started_has_no_hosts():
    assert DIALECT.views('{"Jobs": {"1.ctl": {"job_state": "Q"}}}')["1.ctl"].nodes == ()


def test_unknown_job_prints_nothing_to_read():
    assert (
        DIALECT.views("") == {}
    )  # `qstat: Unknown Job Id 999.ctl` is on stderr, with exit code 153


def test_node_file_with_a_line_for_each_mpi_process_is_two_hosts():
    environment = {**TASK, "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_NODEFILE": "aux"}
    found = DIALECT.allocation(environment, lambda path: "n1\nn1\nn2\nn2\n")
    assert found.nodes == (
        AllocatedNode(name="n1", slot=0),
        AllocatedNode(name="n2", slot=2),
    )
    assert found.job_id == "9.ctl"


@pytest.mark.parametrize(("node", "slot"), [("n1", 0), ("n2", 2)])
def test_pbsdsh_takes_the_line_of_the_node_file_by_its_number(node, slot):
    start = NodeStart(node=node, slot=slot, command=("/bin/hostname",))
    assert DIALECT.node_argv(start) == ["pbsdsh", "-n", str(slot), "--", "/bin/hostname"]


def test_command_by_its_name_is_refused_since_pbsdsh_brings_no_path():
    with pytest.raises(ValueError, match="absolute path"):
        DIALECT.node_argv(NodeStart(node="n2", slot=2, command=("hostname",)))


def test_second_process_of_a_host_has_no_node_file():
    def read(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    with pytest.raises(EngineError, match="list of this job's nodes"):
        DIALECT.allocation(TASK, read)


def test_any_key_of_a_chunk_and_any_line_can_be_added():
    chunk = NodeChunk(num_nodes=2, cpus=288, extra=(("mpiprocs", "2"), ("sales_op", "blanca")))
    script = DIALECT.script(
        request(
            chunks=(chunk,), queue="blanca", account="acct", directives=("-P climate", "-W x=y")
        )
    )
    for line in (
        "#PBS -l select=2:ncpus=288:mpiprocs=2:sales_op=blanca",
        "#PBS -l place=scatter",
        "#PBS -q blanca",
        "#PBS -A acct",
        "#PBS -P climate",
        "#PBS -W x=y",
    ):
        assert line in script.splitlines()


def test_a_job_does_not_wait_for_those_that_wait_for_it():
    fields = {"job_state": "H", "depend": "afterok:1028.ctl@ctl,beforeok:1030.ctl@ctl"}
    assert view_of("1029.ctl", fields).reason == "waits: afterok:1028.ctl@ctl"
    finished = {"job_state": "H", "depend": "beforeany:16.ctl@ctl"}
    assert view_of("15.ctl", finished).reason is None


FIELDS = {
    "Job_Name": "okjob",
    "job_state": "F",
    "exec_host": "n1/0*2+n2/0*2",
    "Exit_status": 7,
    "comment": "Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2:ngpus=1)+(n2:ncpus=2:ngpus=1) and failed",
}
# The manual's form: a value is wrapped behind a comma or a plus, the rest begins with a tab.
TEXT = """
Job Id: 1.ctl
    Job_Name = okjob
    Job_Owner = lab@ctl
    job_state = F
    exec_host = n1/0*2+
\tn2/0*2
    Resource_List.ncpus = 4
    Variable_List = PBS_O_HOME=/home/lab,PBS_O_LANG=en_US.UTF-8,
\tPBS_O_LOGNAME=lab,job_state = R
    comment = Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2:ngpus=1)+(n2:ncpus
\t=2:ngpus=1) and failed
    Exit_status = 7

Job Id: 2.ctl
    job_state = Q
    estimated.start_time = Sat Nov 21 14:00:00 2026
"""


def jobs_of(text):
    return '{"timestamp": 1795170486, "Jobs": ' + text + "}"


def test_wrapped_text_says_what_json_says():
    from_json = DIALECT.views(json.dumps({"Jobs": {"1.ctl": FIELDS}}))["1.ctl"]
    from_text = DIALECT.views(TEXT)
    assert from_text["1.ctl"] == from_json
    assert from_text["1.ctl"].exit_code == 7
    assert from_text["1.ctl"].nodes == ("n1", "n2")
    assert from_text["2.ctl"].start_estimate == "Sat Nov 21 14:00:00 2026"


def test_lines_that_a_site_prints_before_are_left_out():
    assert DIALECT.views(f"Welcome to the cluster\n{TEXT}").keys() == {"1.ctl", "2.ctl"}
    assert (
        DIALECT.views("Welcome\n" + jobs_of('{"1": {"job_state": "R"}}'))["1"].state.value
        == "running"
    )


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('{"1": {"Account_Name": 007, "job_state": "R"}}', {"Account_Name": "007"}),
        ('{"1": {"Job_Name": 1., "job_state": "R"}}', {"Job_Name": "1."}),
        ('{"1": {"Path": "C:\\Users\\x", "job_state": "R"}}', {}),
        ('{"1": {"Path": "a\\qb", "job_state": "R"}}', {"Path": "a\\qb"}),
        ('{"1": {"comment": "a\tb\nc", "job_state": "R"}}', {"comment": "a\tb\nc"}),
        (
            '{"1": {"comment": "x = 007, 1.", "n": 08, "job_state": "R"}}',
            {"comment": "x = 007, 1."},
        ),
    ],
)
def test_json_that_is_none_is_mended(text, fields):
    found = read_jobs(jobs_of(text))
    assert found["1"]["job_state"] == "R"
    assert {key: found["1"][key] for key in fields} == fields


def test_table_that_begins_anew_for_each_job_is_one():
    text = '{"Jobs": {"1": {"job_state": "R"}}, "Jobs": {"2": {"job_state": "Q"}}}'
    assert set(read_jobs(text)) == {"1", "2"}


def test_key_that_comes_twice_has_its_last_value():
    assert (
        read_jobs(jobs_of('{"1": {"job_state": "Q", "job_state": "R"}}'))["1"]["job_state"] == "R"
    )


def test_text_behind_the_end_is_left_out():
    assert set(read_jobs(jobs_of('{"1": {}}') + "\nqstat: done\n")) == {"1"}


@pytest.mark.parametrize(
    "text", ["nothing at all", "{", '{"Jobs": ' + "[" * 9999, "<Data>", "<!DOCTYPE x><Data/>"]
)
def test_what_is_no_answer_is_an_error(text):
    with pytest.raises(ValueError, match=r"."):
        read_jobs(text)


@given(
    st.dictionaries(
        st.sampled_from(["comment", "Job_Name", "project", "n"]),
        st.one_of(st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    )
)
def test_good_json_is_read_as_it_is(fields):
    assert read_jobs(jobs_of(json.dumps({"1": fields}))) == {"1": fields}


@given(st.text(st.sampled_from('{}[]":,\\ \n\tJobs<>01.aId=')))
def test_garbage_ends_in_an_answer_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        read_jobs(text)
