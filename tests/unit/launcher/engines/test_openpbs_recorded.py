"""Every answer that was recorded from a real OpenPBS 23.06.06, and what is made of it: one row for each."""

import json

import pytest
from tests.unit.launcher.model.jobs import request

from torchmuster.launcher.engines.base import EngineError, NodeStart
from torchmuster.launcher.engines.pbs import DIALECT, view_of
from torchmuster.launcher.model.job import AllocatedNode, JobState, NodeChunk

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
