"""The copies of a run's record on other pods: of this run alone, whatever else has used the same home."""

import os
import shlex
from dataclasses import replace

import pytest

from kit.waiting import wait_until
from torchmuster import proc
from torchmuster.files import atomic
from torchmuster.model import codec
from torchmuster.node.remote.files import MARK_FILE, make_mark
from torchmuster.owner.firstpod.neighbours import RecordNeighbours
from unit.owner.pods.conftest import order_of

RECORD = '{"event":"run_started"}\n'


class OtherPods:
    """Lets the command for another pod run here, in the home of that pod."""

    def __init__(self, folder):
        self.folder, self.asked = folder, []

    def start(self, argv, stdin, stdout, stderr):
        host, command = argv
        self.asked.append(command)
        home = self.folder / "others" / host.partition(".")[0]
        variables = {
            "MUSTER_HOME": str(home),
            "MUSTER_ORDER": str(self.folder / "order.json"),
            "MUSTER_PROGRAMS": shlex.join(proc.node_program("")[:-1]),
        }
        words = [f"{name}={value}" for name, value in variables.items()]
        return proc.start_beside(
            ["env", *words, "sh", "-c", command], stdin=stdin, stdout=stdout, stderr=stderr
        )

    def kept(self, index=1):
        """Return what a pod keeps, by its path below the pod's home."""
        return sorted((self.folder / "others").glob(f"*-{index}/records/*/events.jsonl"))


@pytest.fixture
def others(tmp_path):
    return OtherPods(tmp_path)


def neighbours_of(others, pod, run_id, **given):
    order = order_of(home=str(others.folder / pod))
    order = replace(order, run_id=run_id, num_pods=2, **given)
    os.makedirs(order.run_dir.path, exist_ok=True)
    atomic.write_json(str(others.folder / "order.json"), codec.to_plain(order))
    return RecordNeighbours(order, "key", others.start), order.run_dir


def copy_record(others, run_id, text=RECORD):
    """Let a first pod's record come to its neighbour; return the run directory and what ends the copying."""
    neighbours, run_dir = neighbours_of(others, "first", run_id)
    make_mark(run_dir.path)
    with open(run_dir.events, "w") as file:
        file.write(text)
    neighbours.start()
    wait_until(lambda: others.kept() and others.kept()[0].read_text() == text, "the copy")
    return neighbours, run_dir


def test_a_first_pod_that_was_made_again_finds_its_record(others):
    neighbours, first = copy_record(others, "run-1")
    neighbours.stop(is_taken_away=True)
    again, run_dir = neighbours_of(others, "again", "run-1")
    said = []
    again.find(said.append)
    for path in (run_dir.events, os.path.join(run_dir.path, MARK_FILE)):
        with open(path) as file, open(path.replace(run_dir.path, first.path)) as before:
            assert file.read() == before.read()
    assert len(said) == 1


def test_who_takes_the_place_of_a_pod_that_is_taken_away_finds_its_last_words(others):
    neighbours, first = copy_record(others, "run-1")
    with open(first.events, "a") as file:
        file.write('{"event":"run_ended"}\n')
    neighbours.stop(is_taken_away=True)
    assert others.kept()[0].read_text() == RECORD + '{"event":"run_ended"}\n'


def test_of_a_line_that_came_in_part_nothing_is_taken(others):
    neighbours, _ = copy_record(others, "run-1", RECORD + '{"event":"att')
    neighbours.stop(is_taken_away=True)
    again, run_dir = neighbours_of(others, "again", "run-1")
    again.find(lambda _: None)
    with open(run_dir.events) as file:
        assert file.read() == RECORD


def test_a_copy_of_another_disk_begins_anew(others):
    neighbours, first = copy_record(others, "run-1", RECORD * 3)
    neighbours.stop(is_taken_away=True)
    os.unlink(os.path.join(first.path, MARK_FILE))
    neighbours, _ = copy_record(others, "run-1", RECORD)
    neighbours.stop(is_taken_away=True)
    assert others.kept()[0].read_text() == RECORD


@pytest.mark.parametrize("given", [{"run_id": "run-2"}, {"run_id": "run-1", "group": "g"}])
def test_the_record_of_another_run_or_group_is_not_taken(others, given):
    neighbours, _ = copy_record(others, "run-1")
    neighbours.stop(is_taken_away=True)
    again, run_dir = neighbours_of(others, "again", **given)
    again.find(pytest.fail)
    assert not os.path.exists(run_dir.events)


def test_on_a_volume_nobody_is_asked(others):
    neighbours, _ = neighbours_of(others, "again", "run-1", has_volume=True)
    neighbours.find(pytest.fail)
    neighbours.start()
    assert others.asked == []
