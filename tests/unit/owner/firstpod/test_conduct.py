"""What the first pod leaves in its last message."""

import json

import pytest

from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Report, Result
from torchmuster.node.pod.order import NUM_FILES_KEY, VALUES_KEY
from torchmuster.owner.firstpod.conduct import MOST_MESSAGE_BYTES, last_message, newest_values

DONE = Result(
    run_id="s.1",
    state=RunState.SUCCEEDED,
    exit_code=0,
    attempts=1,
    restarts_spent=0,
    elapsed_s=2.0,
)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(str(tmp_path))


def record(run_dir, *values):
    with open(run_dir.training, "w") as file:
        file.writelines(
            json.dumps({"event": "metrics", "step": step, "values": one}) + "\n"
            for step, one in enumerate(values)
        )


def test_the_newest_value_of_each_metric_is_one_event(run_dir):
    record(run_dir, {"loss": 3, "lr": 1}, {"loss": 2, "accuracy": 0.5}, {"loss": 1})
    expected = {"loss": 1, "lr": 1, "accuracy": 0.5}
    assert newest_values(run_dir) == {"event": "metrics", "step": 2, "values": expected}


@pytest.mark.parametrize("values", [[], [{f"metric-{k}": 0.5 for k in range(200)}]])
def test_no_metrics_and_too_many_of_them_are_left_out(run_dir, values):
    record(run_dir, *values)
    assert newest_values(run_dir) is None


def test_what_a_member_leaves_is_beside_its_result(run_dir):
    plain = json.loads(last_message(DONE, {NUM_FILES_KEY: 2, VALUES_KEY: {"step": 2}}))
    assert (plain.pop(NUM_FILES_KEY), plain.pop(VALUES_KEY)) == (2, {"step": 2})
    assert codec.from_plain(Result, plain) == DONE


def test_a_long_report_is_cut_to_what_kubernetes_keeps_and_the_values_stay(run_dir):
    because = tuple(f"{k}: {'x' * 500}" for k in range(20))
    failed = Report(error="it failed", at="rank 0", because=because)
    record(run_dir, {f"metric-{k}": 0.5 for k in range(30)})
    values = newest_values(run_dir)
    told = last_message(
        codec.from_plain(Result, codec.to_plain(DONE) | {"report": codec.to_plain(failed)}),
        {VALUES_KEY: values},
    )
    assert len(told.encode()) <= MOST_MESSAGE_BYTES
    assert json.loads(told)[VALUES_KEY] == values
    assert json.loads(told)["report"]["error"] == "it failed"
