"""Starts of agents on the other nodes of a job: those that hang, and those that end at once."""

import pytest

from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.launcher.engines.allocation import AllocationEngine, LaunchCommand, OwnJob
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.model.job import AllocatedNode, Allocation

LIMIT_S = 90.0
HANGS = ("sh", "-c", "sleep 600")
FAILS = ("sh", "-c", "echo mpiexec: no other MPI >&2; exit 3")


class OneWay(LaunchCommand):
    """Starts the same command whatever it is asked."""

    def argv(self, dialect, node, command):
        return list(self.program)


@pytest.fixture
def engine(tmp_path):
    made = []

    def make(command):
        nodes = tuple(AllocatedNode(name=name, slot=slot) for slot, name in enumerate(("n1", "n2")))
        allocation = Allocation(job_id="7.ctl", nodes=nodes)
        way = OneWay(program=command)
        job = OwnJob(dialect=load_dialect("pbs"), allocation=allocation, launcher=way)
        made.append(AllocationEngine(None, RunDir(str(tmp_path)), job))
        return made[-1]

    yield make
    for one in made:
        for _, child in one._agents:
            proc.kill_session(child.pid)
            child.wait(LIMIT_S)


def test_a_start_that_hangs_is_ended_and_tried_again(engine, monkeypatch):
    one = engine(HANGS)
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
    one = engine(FAILS)
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
    log.write_text("error: of an earlier start\nmuster: job 7.ctl\n")
    told = "error: the job's variables can't be read at /home/environment.json"
    script = f'echo "{told}" >> {log}; echo "muster: it goes on" >> {log}; echo "{pbsdsh}: task 0x00000000 exit status 3"'
    one = engine(("sh", "-c", script))
    one.start_place(1)
    (end,) = wait_until(one.poll)
    assert end.status == 0
    assert end.said == (f"{pbsdsh}: task 0x00000000 exit status 3", told)
