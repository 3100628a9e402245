"""The judge of the matrix sees what is wrong, and the worlds leave nothing on the machine."""

import subprocess
import sys
from dataclasses import replace

import pytest

from kit.world import make_home, remove_home
from matrix.faults import FAULTS
from matrix.judge import judge
from matrix.worlds.local import LocalWorld

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
pytestmark = pytest.mark.netns
BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture
def world():
    """Return the world of simulated nodes; not in /tmp, of which its nodes have one of their own."""
    folder = make_home()
    made = LocalWorld(folder / "world")
    if (reason := made.why_not()) is not None:
        pytest.skip(reason)
    with made:
        yield made
    remove_home(folder)


def test_a_right_answer_is_ok(world):
    cell = judge(world, BY_NAME["sigkill"])
    assert cell.word == "ok", f"{cell.why}\n{cell.said}"
    assert not world.processes()


def test_another_rank_than_the_hurt_one_is_wrong(world):
    cell = judge(world, replace(BY_NAME["sigkill"], ranks=(2,)))
    assert cell.word == "failed"
    assert cell.why == "the cause is rank 3, not 2"


def test_an_answer_that_is_never_shown_is_wrong(world):
    cell = judge(world, replace(BY_NAME["sigkill"], shown="the moon was full"))
    assert cell.word == "failed"
    assert cell.why.startswith("the cause was not named, but: error: rank 3 was ended by SIGKILL")


def test_a_process_and_a_file_that_are_left_behind_are_wrong(world, monkeypatch):
    monkeypatch.setattr("matrix.judge.LEFT_WITHIN_S", 0.5)

    def kill_and_leave(running):
        environment = {"MUSTER_MATRIX": str(world.folder)}
        words = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
        with open("/dev/null", "w") as null:
            left.append(subprocess.Popen(words, env=environment, stdout=null))
        return BY_NAME["sigkill"].hurt(running)

    left = []
    cell = judge(world, replace(BY_NAME["sigkill"], hurt=kill_and_leave))
    left[0].wait()
    assert cell.why.startswith("left behind processes: ")

    def kill_and_litter(running):
        world.on("n1", "touch", "/tmp/litter")
        return BY_NAME["sigkill"].hurt(running)

    cell = judge(world, replace(BY_NAME["sigkill"], hurt=kill_and_litter))
    assert cell.why == "left behind files: n1:/tmp/litter, n2:/tmp/litter"


def test_what_can_not_be_made_says_why(world):
    cell = judge(world, BY_NAME["link"])
    assert cell.word == "impossible"
    assert "there is no link" in cell.why
