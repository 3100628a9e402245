"""The job around a process: its nodes, the command that starts agents on the others, and the starts."""

import os

import pytest

from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.errors import UsageError
from torchmuster.launcher.engines import allocation
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.engines.pbs import DIALECT as PBS
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.engines.slurm import DIALECT as SLURM
from torchmuster.launcher.model.job import AllocatedNode, Allocation, NodeLauncher


def job_of(*names, own_node=None, engine="slurm", launcher=None):
    nodes = tuple(AllocatedNode(name=name, slot=slot) for slot, name in enumerate(names))
    found = Allocation(job_id="7", nodes=nodes, own_node=own_node)
    return allocation.OwnJob(dialect=load_dialect(engine), allocation=found, launcher=launcher)


# Which of its nodes this is, and which of them are ours.


HERE = f"{os.uname().nodename.partition('.')[0]}.cluster"


@pytest.mark.parametrize(
    ("this", "own_node"),
    [("n2", "n2"), ("n2", "n2.cluster"), (HERE, None)],
    ids=["as the scheduler says", "with its domain", "as the system says"],
)
def test_this_node_comes_first(this, own_node):
    assert job_of("n1", this, "n3", own_node=own_node).from_here().node_names == (this, "n1", "n3")


def test_a_login_node_is_no_node_of_the_job():
    assert job_of("n1", "n2", own_node="login").from_here() is None


def test_one_node_needs_no_way_to_others():
    job = job_of("n1")
    assert job.with_launcher() is job


def test_other_nodes_of_a_torque_job_are_refused_with_what_to_use(monkeypatch):
    monkeypatch.setenv("PBS_VERSION", "TORQUE-6.0.2")
    with pytest.raises(UsageError, match="Torque") as refused:
        job_of("n1", "n2").with_launcher()
    assert refused.value.where == "job 7"
    assert "muster run --hosts" in refused.value.fix
    assert not job_of("n1", "n2").can_start_others
    assert job_of("n1").with_launcher().node_names == ("n1",)


def test_the_job_is_found_from_the_environment(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    for engine in (["slurm"], []):
        assert allocation.find_own_job(*engine).node_names == ("n1", "n2")


def test_who_is_in_no_job_of_a_scheduler_is_told_so():
    with pytest.raises(UsageError, match="this is not a job of slurm"):
        allocation.own_job("slurm", "/runs/r")


# Which command starts agents on the other hosts, from what is there.

NODE = AllocatedNode(name="n2", slot=4)


def no_file(path):
    raise FileNotFoundError(path)


def finding(there):
    return lambda word: word if word in there else None


def choose(dialect, there, wanted=(), environment=None, read=no_file):
    """Choose where these commands are."""
    return allocation.choose_launcher(dialect, wanted, environment or {}, finding(there), read)


def test_pbsdsh_is_the_usual_way_and_not_worth_a_line():
    way = choose(PBS, {"pbsdsh", "ssh"})
    assert (way.kind, way.program, way.sentence) == (NodeLauncher.PBSDSH, None, None)


def test_first_that_is_there_is_taken_and_said():
    way = choose(PBS, {"pbs_tmrsh", "ssh"})
    assert way.kind is NodeLauncher.TMRSH
    assert way.sentence == (
        "agents of the other hosts are started by pbs_tmrsh: there is no pbsdsh and no mpiexec here that works"
    )


@pytest.mark.parametrize(
    ("environment", "read", "folder"),
    [
        ({"PBS_EXEC": "/cm/pbs"}, no_file, "/cm/pbs"),
        ({}, lambda path: "PBS_SERVER=s\nPBS_EXEC=/x/pbs\n", "/x/pbs"),
        ({}, no_file, "/opt/pbs"),
    ],
)
def test_command_is_looked_for_where_pbs_is_installed(environment, read, folder):
    way = choose(PBS, {f"{folder}/bin/pbsdsh"}, environment=environment, read=read)
    words = [f"{folder}/bin/pbsdsh", "-n", "4", "--", "/bin/x", "a b"]
    assert way.argv(PBS, NODE, ["/bin/x", "a b"]) == words
    assert f"{folder}/bin/pbsdsh" in way.sentence


def test_list_of_the_site_is_obeyed_in_its_order():
    way = choose(
        PBS, {"pbsdsh", "ssh"}, wanted=(NodeLauncher.MPIEXEC, NodeLauncher.SSH, NodeLauncher.PBSDSH)
    )
    assert way.kind is NodeLauncher.SSH
    assert "by ssh: there is no mpiexec here that works" in way.sentence


def test_nothing_there_is_an_error_that_names_all():
    with pytest.raises(EngineError) as caught:
        choose(PBS, set())
    assert caught.value.why == "none of these exists: pbsdsh, mpiexec, pbs_tmrsh, ssh"
    assert "/opt/pbs/bin" in caught.value.where


@pytest.mark.parametrize(
    ("wanted", "end"),
    [
        ((NodeLauncher.MPIEXEC,), "another MPI's"),
        ((), "; none of these exists: pbsdsh, pbs_tmrsh, ssh"),
    ],
)
def test_openpbs_s_own_mpiexec_is_not_called_missing(wanted, end):
    with pytest.raises(EngineError) as caught:
        choose(PBS, {"mpiexec"}, wanted=wanted, read=lambda _: "no non-PBS mpiexec in PBS_O_PATH")
    assert "mpiexec is OpenPBS's own, which only calls another MPI's" in caught.value.why
    assert caught.value.why.endswith(end)


def test_slurm_has_one_way():
    assert choose(SLURM, set()).kind is None


def test_words_of_the_command_line_are_ways():
    assert allocation.parse_launchers("pbs_tmrsh,ssh") == (NodeLauncher.TMRSH, NodeLauncher.SSH)
    assert allocation.parse_launchers(None) == ()
    with pytest.raises(UsageError, match="`rsh` is not a launcher"):
        allocation.parse_launchers("pbsdsh,rsh")


WRAPPER = "#!/bin/sh\necho mpiexec:  unexpected error - no non-PBS mpiexec in PBS_O_PATH\n"


@pytest.mark.parametrize(
    ("path", "text", "kind"),
    [
        ("/usr/bin/mpiexec", WRAPPER, NodeLauncher.TMRSH),
        ("/opt/pbs/bin/mpiexec", "another text", NodeLauncher.TMRSH),
        ("/usr/bin/mpiexec", "the one of an MPI", NodeLauncher.MPIEXEC),
    ],
)
def test_pbs_s_own_mpiexec_is_no_way(path, text, kind):
    there = {"mpiexec": path, "pbs_tmrsh": "/opt/pbs/bin/pbs_tmrsh", path: path}

    def read(name):
        return text if name == path else no_file(name)

    wanted = (NodeLauncher.MPIEXEC, NodeLauncher.TMRSH)
    assert allocation.choose_launcher(PBS, wanted, {}, there.get, read).kind is kind


@pytest.mark.parametrize(
    ("dialect", "there", "path"),
    [
        (PBS, {"/opt/pbs/bin/qstat"}, "/usr/bin:/opt/pbs/bin"),
        (PBS, {"qstat", "/opt/pbs/bin/qstat"}, "/usr/bin"),
        (PBS, set(), "/usr/bin"),
        (SLURM, {"/opt/pbs/bin/squeue"}, "/usr/bin"),
    ],
)
def test_a_job_whose_shell_has_lost_the_path_of_pbs_finds_its_commands(dialect, there, path):
    environment = {"PATH": "/usr/bin"}
    allocation.find_commands(dialect, environment, finding(there), no_file)
    assert environment["PATH"] == path


# Starts of agents on the other nodes: those that hang, and those that end at once.

LIMIT_S = 90.0


class OneWay(allocation.LaunchCommand):
    """Starts the same command whatever it is asked."""

    def argv(self, dialect, node, command):
        return list(self.program)


@pytest.fixture
def engine(tmp_path):
    made = []

    def make(*command):
        job = job_of("n1", "n2", engine="pbs", launcher=OneWay(program=command))
        made.append(allocation.AllocationEngine(None, RunDir(str(tmp_path)), job))
        return made[-1]

    yield make
    for one in made:
        for _, child in one._agents:
            proc.kill_session(child.pid)
            child.wait(LIMIT_S)


def test_a_start_that_hangs_is_ended_and_tried_again(engine, monkeypatch):
    one = engine("sleep", "600")
    one.start_place(1)
    (hanging,) = one.pids
    assert one.holds(1)

    monkeypatch.setattr(proc, "CALL_LIMIT_S", -1.0)
    assert not one.holds(1), "an agent would have called long ago"
    monkeypatch.setattr(proc, "CALL_LIMIT_S", 60.0)
    one._starters[hanging]._began_at -= 61.0
    one.start_place(1)
    assert len(one.pids) == 2
    wait_until(lambda: not proc.is_running(hanging))
    assert one.holds(1)


def test_a_start_that_ends_at_once_leaves_its_words(engine):
    one = engine("sh", "-c", "echo mpiexec: no other MPI >&2; exit 3")
    one.start_place(1)
    (end,) = wait_until(one.poll)
    assert (end.place, end.status, end.said) == (1, 3, ("mpiexec: no other MPI",))
    assert proc.describe_end(end.status, end.said) == (
        "what started its agent ended (exit code 3): mpiexec: no other MPI"
    )


@pytest.mark.parametrize("pbsdsh", ["pbsdsh", "/opt/pbs/bin/pbsdsh"])
def test_a_start_whose_task_failed_elsewhere_has_the_words_of_the_job_s_output(
    engine, tmp_path, pbsdsh
):
    """As pbsdsh of OpenPBS 23.06.06: it ends with 0, tells on standard output, and the task's words are the job's."""
    log = tmp_path / "job.log"
    log.write_text("error: of an earlier start\nmuster: job 7\n")
    told = "error: the job's variables can't be read at /home/environment.json"
    script = f'echo "{told}" >> {log}; echo "muster: it goes on" >> {log}; echo "{pbsdsh}: task 0x00000000 exit status 3"'
    one = engine("sh", "-c", script)
    one.start_place(1)
    (end,) = wait_until(one.poll)
    assert end.status == 0
    assert end.said == (f"{pbsdsh}: task 0x00000000 exit status 3", told)
