"""The copies of a run's record on other pods: of this run alone, whatever else has used the same home."""

import os
import subprocess
from dataclasses import replace

import pytest

from torchmuster import proc
from torchmuster.owner.firstpod.neighbours import RecordNeighbours
from unit.owner.pods.conftest import order_of

RECORD = '{"event":"run_started"}\n'


@pytest.fixture
def other_pod(tmp_path):
    """Let the command for another pod run here, in the home of that pod; return the commands."""
    asked = []

    def ask(index, command, data, limit_s):
        asked.append(command)
        said = subprocess.run(
            ["sh", "-c", command],
            env={"PATH": os.environ["PATH"], "MUSTER_HOME": str(tmp_path / "other")},
            input=data,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
        return proc.Answered(status=said.returncode, stdout=said.stdout, stderr=said.stderr)

    ask.asked = asked
    return ask


def neighbours_of(tmp_path, pod, run_id, ask, **given):
    order = order_of(home=str(tmp_path / pod))
    order = replace(order, run_id=run_id, num_pods=2, **given)
    os.makedirs(order.run_dir.path, exist_ok=True)
    return RecordNeighbours(order, "key", ask), order.run_dir


def copy_record(tmp_path, run_id, ask):
    neighbours, run_dir = neighbours_of(tmp_path, "first", run_id, ask)
    with open(run_dir.events, "w") as file:
        file.write(RECORD)
    neighbours._send(1, "events.jsonl", 10.0)


def test_a_first_pod_that_was_made_again_finds_its_record(tmp_path, other_pod):
    copy_record(tmp_path, "run-1", other_pod)
    neighbours, run_dir = neighbours_of(tmp_path, "again", "run-1", other_pod)
    said = []
    neighbours.find(said.append)
    with open(run_dir.events) as file:
        assert file.read() == RECORD
    assert len(said) == 1


@pytest.mark.parametrize("given", [{"run_id": "run-2"}, {"run_id": "run-1", "group": "g"}])
def test_the_record_of_another_run_or_group_is_not_taken(tmp_path, other_pod, given):
    copy_record(tmp_path, "run-1", other_pod)
    neighbours, run_dir = neighbours_of(tmp_path, "again", ask=other_pod, **given)
    neighbours.find(pytest.fail)
    assert not os.path.exists(run_dir.events)


def test_on_a_volume_nobody_is_asked(tmp_path, other_pod):
    neighbours, _ = neighbours_of(tmp_path, "again", "run-1", other_pod, has_volume=True)
    neighbours.find(pytest.fail)
    neighbours.start()
    assert other_pod.asked == []
