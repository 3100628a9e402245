"""What the first pod leaves in its last message."""

import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kit.records import lines
from kit.values import run_result
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.record import read_result
from torchmuster.errors import MusterError
from torchmuster.kubernetes.firstpod.conduct import (
    MOST_MESSAGE_BYTES,
    OwnerInPod,
    last_message,
    newest_values,
)
from torchmuster.kubernetes.node.order import AGAIN_CODE, FINAL_CODE, NUM_FILES_KEY, VALUES_KEY

DONE = run_result(run_id="s.1", elapsed_s=2.0)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(str(tmp_path))


def record(run_dir, *values):
    metrics = [{"event": "metrics", "step": step, "values": one} for step, one in enumerate(values)]
    lines(run_dir.training, metrics)


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


class Owner(OwnerInPod):
    """Owns what this test says.

    Attributes:
        act: What `own` does.
    """

    act = None

    def read(self):
        return read_result(self.run_dir)

    def own(self):
        return self.act()

    def failed(self, error):
        return replace(DONE, state=RunState.FAILED, report=Report(error=error.what))

    def stopped(self):
        return replace(DONE, state=RunState.CANCELLED, attempts=0)

    def is_whole(self, ended):
        return ended.state is RunState.SUCCEEDED

    def set_aside(self):
        os.replace(self.run_dir.result, self.run_dir.result + ".0")

    def end(self, ended):
        write(self.run_dir, ended)
        return self.code_of(ended)

    def code_of(self, ended):
        return 0 if ended.state is RunState.SUCCEEDED else FINAL_CODE


def write(run_dir, result):
    with open(run_dir.result, "w") as file:
        json.dump(codec.to_plain(result), file)


@pytest.fixture
def owner(run_dir):
    order = SimpleNamespace(
        run_dir=run_dir, folder=run_dir.path, ended=run_dir.path + "/ended", job="j"
    )
    said = []
    made = Owner(order, "key", "order", SimpleNamespace(say=said.append, said=said))
    before = signal.getsignal(signal.SIGTERM)
    yield made
    signal.signal(signal.SIGTERM, before)


def ends(state, **values):
    return replace(DONE, state=state, **values)


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("signum", [None, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("way", ["succeeds", "fails", "raises"])
def test_a_pod_that_is_taken_away_is_followed_by_another_and_a_cancelled_one_is_not(
    owner, run_dir, is_cancelled, signum, way
):
    def act():
        result = ends(RunState.SUCCEEDED if way == "succeeds" else RunState.CANCELLED, attempts=3)
        write(run_dir, result)
        try:
            if signum is not None:
                signal.raise_signal(signum)
        except KeyboardInterrupt:
            if way != "succeeds":
                raise
        if way == "raises":
            raise MusterError("the disk is full")
        return result if way == "succeeds" else ends(RunState.FAILED)

    owner.act = act
    if is_cancelled:
        with open(run_dir.cancelled, "w"):
            pass
    code = owner.run()
    if way == "succeeds":
        assert code == 0
    elif signum is None or is_cancelled:
        assert code == FINAL_CODE
    else:
        assert code == AGAIN_CODE
        assert read_result(run_dir) is None, "nothing looks like an end"


def test_what_was_written_of_a_cancelled_run_stays_when_its_end_fails(owner, run_dir):
    def act():
        with open(run_dir.cancelled, "w"):
            pass
        owner.requests.ask(signal.SIGTERM, 1.0)  # as the supervisor counts it
        write(run_dir, ends(RunState.CANCELLED, attempts=3))
        raise MusterError("some processes of the run could not be ended")

    owner.act = act
    assert owner.run() == FINAL_CODE
    assert read_result(run_dir).attempts == 3
    assert owner.voice.said == ["some processes of the run could not be ended"]


def test_a_bug_is_no_end_of_a_run(owner):
    def act():
        raise ValueError("a bug")

    owner.act = act
    with pytest.raises(ValueError, match="a bug"):
        owner.run()


def test_an_end_that_was_interrupted_is_not_made_again(owner, run_dir):
    write(run_dir, ends(RunState.SUCCEEDED))
    with open(owner.order.ended, "w"):
        pass
    assert owner.run() == 0, "and `own`, which is not there, was not called"
