"""Scripts of PBS word for word, and every answer that was recorded from a real OpenPBS 23.06.06 with two hosts."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.launcher.model.jobs import AFTER, JOBS, ODD_PATH, request

from torchmuster.errors import UsageError
from torchmuster.launcher.engines import pbs
from torchmuster.launcher.engines.base import EngineError, NodeStart
from torchmuster.launcher.engines.pbs import DIALECT, read_jobs
from torchmuster.launcher.model.job import (
    AllocatedNode,
    Allocation,
    JobState,
    JobView,
    NodeChunk,
    NodeLauncher,
)

RUN = "Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2:ngpus=1)+(n2:ncpus=2:ngpus=1)"


def view(**fields):
    return DIALECT.views(json.dumps({"Jobs": {"1.ctl": fields}}))["1.ctl"]


# What is submitted.


EVERYTHING = request(
    name="7 days' run",
    time_limit_s=3601,
    queue="gpu",
    account="proj-1",
    directives=("-l place=excl", "-P climate", "-W sandbox=PRIVATE"),
    setup=("module load cuda/12.6",),
    requeue=False,
)


@pytest.mark.parametrize("name", JOBS)
def test_whole_script(name, golden):
    golden("scripts/pbs.txt", name, DIALECT.script({**JOBS, "everything": EVERYTHING}[name]))


def test_a_key_of_the_site_takes_the_place_of_ours_in_a_chunk():
    chunk = NodeChunk(num_nodes=2, cpus=288, extra=(("mpiprocs", "2"), ("sales_op", "blanca")))
    select = "#PBS -l select=2:ncpus=288:mpiprocs=2:sales_op=blanca"
    assert select in DIALECT.script(request(chunks=(chunk,))).splitlines()


@pytest.mark.parametrize("outlives", [True, False])
def test_only_a_run_that_goes_on_without_a_node_asks_pbs_to_keep_the_job(outlives):
    script = DIALECT.script(request(outlives_nodes=outlives))
    assert ("#PBS -W tolerate_node_failures=all\n" in script) is outlives


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


REFUSALS = {
    "qsub: Unknown queue": "PBS knows no such queue",
    "qsub: Queue is not enabled": "the queue is closed: it takes no jobs now",
    "qsub: Job violates queue and/or server resource limits": "the job asks for more than the queue allows",
    "qsub: Job exceeds queue and/or server resource limits": "the job asks for more than the queue allows",
    "qsub: Unknown resource: foo": "PBS knows no such resource",
    "qsub: Illegal attribute or resource value": "PBS does not take one of the resources",
    "qsub: Illegal attribute or resource value Resource_List.walltime": (
        "PBS does not take this time limit"
    ),
    "qsub: script file:: No such file or directory": "qsub can't read the job script",
    "qsub: Unauthorized Request": "PBS does not let you use this queue or account",
}


@pytest.mark.parametrize("stderr", REFUSALS)
def test_refusal_of_qsub_is_explained_and_kept(stderr):
    report = DIALECT.explain_refusal(f"{stderr}\n")
    assert (report.error, report.because) == (REFUSALS[stderr], (stderr,))


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


# What is said of a job.


def fields(state, **more):
    return {"job_state": state, **more}


def ended(exit_status, how="", **more):
    """Return the fields of a job that has ended so."""
    comment = {"comment": f"{RUN} and {how}"} if how else {}
    return fields("F", Exit_status=exit_status, **comment, **more)


BY_QDEL = "terminated by lab@ctl"
OVER_TIME = "exceeded resource walltime"
NEVER = "Can Never Run: Not enough total nodes available"
# What happened; the fields; state and exit code.
STATES = {
    "running, substate 41": (fields("R", substate=41, comment=RUN), (JobState.RUNNING, None)),
    "running, substate 42": (fields("R", substate=42, comment=RUN), (JobState.RUNNING, None)),
    "held by the user": (fields("H", substate=20), (JobState.HELD, None)),
    "held by a dependency, with PBS's own reason": (
        fields("H", depend="afterok:1.ctl@ctl", comment="held by its owner"),
        (JobState.HELD, None),
    ),
    "more hosts than there are": (fields("Q", comment=NEVER), (JobState.PENDING, None)),
    "exit 0": (ended(0, "finished", substate=92), (JobState.SUCCEEDED, 0)),
    "exit 7": (ended(7, "failed", substate=93), (JobState.FAILED, 7)),
    "killed by signal 9, told as a shell does": (ended(265), (JobState.FAILED, 137)),
    "over its memory": (ended(-27), (JobState.OUT_OF_MEMORY, None)),
    "over its walltime": (ended(-29, OVER_TIME, substate=93), (JobState.TIMED_OUT, None)),
    "qdel while running": (ended(271, BY_QDEL), (JobState.CANCELLED, 143)),
    "qdel of a job that ends well then": (ended(0, BY_QDEL), (JobState.CANCELLED, 0)),
    # A restart of the server loses the comment.
    "qdel before a restart of the server": (ended(271, substate=91), (JobState.CANCELLED, 143)),
    "exit 0 before a restart of the server": (ended(0, substate=92), (JobState.SUCCEEDED, 0)),
    "killed since a lost host came back": (
        ended(271, substate=93, comment=RUN),
        (JobState.FAILED, 143),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_state_of_a_job_with_the_comment_as_its_reason(name):
    said, want = STATES[name]
    found = view(**said)
    assert (found.state, found.exit_code) == want
    assert (found.reason, found.nodes) == (said.get("comment"), ())


def test_job_that_never_ran_says_why():
    found = view(job_state="F", substate=92)
    reason = "it never ran: it was deleted, or a job that it waits for failed"
    assert (found.state, found.exit_code, found.reason) == (JobState.CANCELLED, None, reason)


@pytest.mark.parametrize(
    ("depend", "reason"),
    [
        ("afterok:1.ctl@ctl", "waits: afterok:1.ctl@ctl"),
        ("afterok:1028.ctl@ctl,beforeok:1030.ctl@ctl", "waits: afterok:1028.ctl@ctl"),
        ("beforeany:16.ctl@ctl", None),
    ],
)
def test_held_job_names_what_it_waits_for_and_not_what_waits_for_it(depend, reason):
    found = view(job_state="H", substate=20, depend=depend)
    assert (found.state, found.exit_code, found.reason) == (JobState.HELD, None, reason)


def test_estimated_start_is_that_of_waiting_jobs_only():
    estimated = {"estimated": {"start_time": "Sat Nov 21 14:00:00 2026"}}
    assert view(job_state="Q", **estimated).start_estimate == "Sat Nov 21 14:00:00 2026"
    assert view(job_state="R", **estimated).start_estimate is None


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


def test_whole_answer_of_qstat():
    running = JobView(job_id="1.ctl", state=JobState.RUNNING, reason=RUN, nodes=("n1", "n2"))
    assert DIALECT.views(ANSWER) == {"1.ctl": running}


def test_unknown_job_prints_nothing_to_read():
    # `qstat: Unknown Job Id 999.ctl` is on stderr, with exit code 153
    assert DIALECT.views("") == {}


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


# Every form in which `qstat -f` answers, and JSON that is none.

FIELDS = {
    "Job_Name": "okjob",
    "job_state": "F",
    "exec_host": "n1/0*2+n2/0*2",
    "Exit_status": 7,
    "comment": f"{RUN} and failed",
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
    from_text = DIALECT.views(TEXT)
    assert from_text["1.ctl"] == view(**FIELDS)
    assert from_text["1.ctl"].exit_code == 7
    assert from_text["1.ctl"].nodes == ("n1", "n2")
    assert from_text["2.ctl"].start_estimate == "Sat Nov 21 14:00:00 2026"


def test_lines_that_a_site_prints_before_are_left_out():
    assert DIALECT.views(f"Welcome to the cluster\n{TEXT}").keys() == {"1.ctl", "2.ctl"}
    found = DIALECT.views("Welcome\n" + jobs_of('{"1": {"job_state": "R"}}'))
    assert found["1"].state is JobState.RUNNING


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
        # A key that comes twice has its last value.
        ('{"1": {"job_state": "Q", "job_state": "R"}}', {}),
    ],
)
def test_json_that_is_none_is_mended(text, fields):
    found = read_jobs(jobs_of(text))
    assert found["1"]["job_state"] == "R"
    assert {key: found["1"][key] for key in fields} == fields


def test_table_that_begins_anew_for_each_job_is_one():
    text = '{"Jobs": {"1": {"job_state": "R"}}, "Jobs": {"2": {"job_state": "Q"}}}'
    assert set(read_jobs(text)) == {"1", "2"}


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


# Why a job waits.


@pytest.mark.parametrize(
    "reason",
    [
        NEVER,  # recorded
        "Not Running: Queue not started.",  # recorded
        "Not Running: Insufficient amount of resource: ncpus",
        "Not Running: Not enough free nodes available",
        "Not Running: User has reached queue workq running job limit.",
        "Not Running: Job would conflict with reservation or top job",
        "Job held by lab on Sat Nov 21 at 22:56",
        "waits: afterok:1028.ctl@ctl",
    ],
)
def test_what_pbs_writes_into_a_comment_is_a_sentence(reason):
    waiting = JobView(job_id="5", state=JobState.PENDING, reason=reason)
    assert pbs.REASONS.explained(waiting).wait is not None


def test_a_job_that_pbs_could_not_start_is_not_one_that_a_user_holds():
    said = "job held, too many failed attempts to run"  # as PBS 23.06.06 writes it, after 20
    wait = pbs.REASONS.explained(JobView(job_id="5", state=JobState.HELD, reason=said)).wait
    assert wait.never
    assert "qrls" not in wait.hint


def test_more_cpus_than_a_host_has_are_proven_by_its_hosts():
    hosts = "n1\n     resources_available.ncpus = 8\nn2\n     resources_available.ncpus = 8\n"
    job = '{{"Resource_List": {{"ncpus": 9, "select": "{}", "place": "scatter"}}}}'
    said = "this PBS has 2 hosts of 8 CPUs; the job asks for 9 on one host"
    assert pbs.shortage([job.format("1:ncpus=1+2:ncpus=9:mpiprocs=1"), hosts]) == said
    assert pbs.shortage([job.format("9:ncpus=8"), hosts]) is None  # on hosts, in turn
    vnodes = "n1[0]\n     resources_available.host = n1\n     resources_available.ncpus = 8\n"
    both = vnodes + vnodes.replace("[0]", "[1]")
    assert pbs.shortage([job.format("1:ncpus=9"), both]) is None


def test_the_hosts_of_pbs_are_counted_by_their_cpus():
    cpus = {"n1": 2, "n2": 2, "big": 8}
    text = "".join(f"{n}\n     resources_available.ncpus = {cpus[n]}\n" for n in cpus)
    job = '"comment": "Can Never Run: Not enough total nodes available"'
    said = "this PBS has 1 host of 8 CPUs and 2 hosts of 2 CPUs"
    assert pbs.shortage([job, text]) == said
    assert pbs.shortage([job, ""]) is None


# Inside a job.


@pytest.mark.parametrize(
    ("way", "slot", "argv"),
    [
        (None, 0, ["pbsdsh", "-n", "0", "--", "/bin/x", "a b"]),
        (None, 2, ["pbsdsh", "-n", "2", "--", "/bin/x", "a b"]),
        (NodeLauncher.TMRSH, 2, ["pbs_tmrsh", "n2", "/bin/x", "a b"]),
        (NodeLauncher.MPIEXEC, 2, ["mpiexec", "-n", "1", "-host", "n2", "/bin/x", "a b"]),
        (NodeLauncher.SSH, 2, ["ssh", "-o", "BatchMode=yes", "n2", "/bin/x 'a b'"]),
    ],
)
def test_agent_is_started_on_another_host(way, slot, argv):
    start = NodeStart(node="n2", slot=slot, command=("/bin/x", "a b"), launcher=way)
    assert DIALECT.node_argv(start) == argv


def test_command_by_its_name_is_refused_since_pbsdsh_brings_no_path():
    with pytest.raises(ValueError, match="absolute path"):
        DIALECT.node_argv(NodeStart(node="n2", slot=2, command=("hostname",)))


def test_pbs_starts_nothing_by_srun():
    with pytest.raises(ValueError, match="PBS can't start agents"):
        DIALECT.node_argv(NodeStart(node="n2", command=("/x",), launcher=NodeLauncher.SRUN))


@pytest.mark.parametrize("node", ["-oProxyCommand=x", "n1,n2", "", "n 1"])
def test_name_that_is_an_option_or_a_list_is_refused(node):
    with pytest.raises(ValueError, match="not a valid name of a node"):
        DIALECT.node_argv(NodeStart(node=node, command=("/x",), launcher=NodeLauncher.SSH))


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


def test_hosts_are_the_unique_lines_of_the_node_file(tmp_path):
    (tmp_path / "9.ctl").write_text("n2\nn2\nn10\nn10\n")
    job = {**TASK, "PBS_NODEFILE": str(tmp_path / "9.ctl"), "MUSTER_JOB_ENDS_AT": "1795270870"}
    assert DIALECT.allocation(job, lambda path: Path(path).read_text()) == Allocation(
        job_id="9.ctl",
        nodes=(AllocatedNode(name="n2", slot=0), AllocatedNode(name="n10", slot=2)),
        ends_at=1795270870.0,
        own_node="n10",
    )


def test_cpus_of_a_lone_host_are_known():
    job = {**TASK, "PBS_NODENUM": "0", "PBS_NODEFILE": "x"}
    assert DIALECT.allocation(job, lambda path: "n1\n").nodes[0].cpus == 4


@pytest.mark.parametrize("more", [{}, {"PBS_NODEFILE": "/nonexistent"}])
def test_node_file_that_only_the_first_host_has_is_an_error(more):
    with pytest.raises(EngineError, match="list of this job's nodes") as caught:
        DIALECT.allocation({**TASK, **more}, lambda path: Path(path).read_text())
    assert "first host only" in caught.value.why
