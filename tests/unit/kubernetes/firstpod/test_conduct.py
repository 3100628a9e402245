"""What the first pod does with its run, and leaves in its last message."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.records import lines
from kit.values import run_result
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.net.address import new_secret, write_secret
from torchmuster.core.owner.record import read_result
from torchmuster.errors import MusterError
from torchmuster.kubernetes.firstpod.conduct import (
    MOST_MESSAGE_BYTES,
    OwnerInPod,
    last_message,
    newest_values,
    wait_for_archive,
)
from torchmuster.kubernetes.node.order import AGAIN_CODE, FINAL_CODE, NUM_FILES_KEY, VALUES_KEY
from torchmuster.kubernetes.node.record import arriving_folder
from unit.kubernetes.pods.conftest import order_of

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
    atomic.write_json(run_dir.result, codec.to_plain(result))


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
        Path(run_dir.cancelled).touch()
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
        Path(run_dir.cancelled).touch()
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
    Path(owner.order.ended).touch()
    assert owner.run() == 0, "and `own`, which is not there, was not called"


# How the archive of a run's code gets to the first pod, and stays on a volume for the next run.


DATA = b"the code"


@pytest.fixture
def order(tmp_path):
    sha = hashlib.sha256(DATA).hexdigest()
    own = {"home": str(tmp_path / "home"), "has_volume": True}
    order = order_of(code_sha=sha, code_bytes=len(DATA), **own)
    os.makedirs(order.folder)
    return order


def next_run(order, **given):
    """Return what the next run on the volume was told."""
    found = replace(order, run_id="second", **given)
    os.makedirs(found.folder)
    return found


def wait(order, say, limit_s=30.0):
    wait_for_archive(order, order.home, limit_s, say)


def read(path):
    return Path(path).read_bytes()


def send_later(path, data=DATA):
    """Play the client: send when the pod says that it waits."""

    def say(text):
        assert "the client sends it" in text

        def send():
            Path(f"{path}.part").write_bytes(data)
            os.replace(f"{path}.part", path)

        threading.Thread(target=send).start()

    return say


def test_how_far_the_client_is_is_said(order):
    os.makedirs(arriving_folder(order))
    came = os.path.join(arriving_folder(order), "code.tar.gz")
    Path(came).write_bytes(DATA[:4])
    said = []

    def say(text):
        said.append(text)
        os.replace(came, order.archive)
        Path(order.archive).write_bytes(DATA)

    wait(order, say)
    assert said == ["waiting for the code: the client sends it: 4 B of 8 B (50 %)"]


def never(text):
    raise AssertionError(text)


def test_what_a_client_has_sent_is_there_for_the_next_run(order):
    wait(order, send_later(order.archive))
    assert read(order.archive) == DATA

    os.unlink(order.archive)  # unpacked
    second = next_run(order)
    wait(second, never)
    assert read(second.archive) == DATA


def test_without_a_volume_nothing_is_kept(order):
    order = replace(order, has_volume=False)
    wait(order, send_later(order.archive))
    assert not os.path.exists(os.path.join(order.home, "cache"))


def test_other_code_is_not_taken_for_this(order):
    wait(order, send_later(order.archive))
    other = b"changed!"
    changed = next_run(order, code_sha=hashlib.sha256(other).hexdigest())
    wait(changed, send_later(changed.archive, other))
    assert read(changed.archive) == other
    assert len(os.listdir(os.path.join(order.home, "cache"))) == 2


def test_a_damaged_one_is_removed_and_said(order):
    wait(order, send_later(order.archive))
    with open(order.kept, "r+b") as file:
        file.write(b"THE")
    second = next_run(order)
    with pytest.raises(MusterError) as caught:
        wait(second, never)
    assert caught.value.where == order.kept
    assert not os.path.exists(order.kept)


def test_the_newest_stay(order):
    folder = os.path.join(order.home, "cache")
    os.makedirs(folder)
    for number in range(10):
        path = os.path.join(folder, f"code-{number}.tar.gz")
        Path(path).touch()
        os.utime(path, (number, number))
    wait(order, send_later(order.archive))
    left = sorted(os.listdir(folder))
    assert os.path.basename(order.kept) in left
    assert len(left) == 8
    assert "code-0.tar.gz" not in left


def test_code_that_does_not_come_ends_the_run_with_why(order):
    with pytest.raises(MusterError) as caught:
        wait(order, lambda _: None, 0.0)
    assert caught.value.where == order.archive


# Of two first pods of a run on a volume, the later one has it; a volume that is full stops nobody.


CLAIM = """
import sys, time
from torchmuster.core.model import codec
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.firstpod.conduct import FirstPodClaim
import json

FirstPodClaim(codec.from_plain(PodOrder, json.loads(sys.argv[1])), sys.argv[2]).take()
print("has it", flush=True)
time.sleep(60)
"""


@pytest.fixture
def on_volume(tmp_path):
    return order_of(home=str(tmp_path / "home"), has_volume=True, num_pods=1)


@pytest.fixture
def key(tmp_path):
    path = str(tmp_path / "key")
    write_secret(path, new_secret())
    return path


def start(on_volume, key, pod):
    words = [sys.executable, "-c", CLAIM, json.dumps(codec.to_plain(on_volume)), key]
    environment = {**os.environ, "MUSTER_POD_UID": pod}
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_earlier_of_two_owners_on_a_volume_ends_before_the_later_one_begins(on_volume, key):
    with start(on_volume, key, "one") as earlier:
        assert earlier.stdout.readline() == "has it\n"
        with start(on_volume, key, "two") as later:
            assert later.stdout.readline() == "has it\n"
            assert earlier.wait(5) == AGAIN_CODE
            assert "another first pod has this run now" in earlier.stderr.read()
            assert proc.read_process(later.pid) is not None
            later.kill()


def test_a_volume_that_can_not_be_written_stops_nobody(on_volume, key, tmp_path):
    (tmp_path / "home").write_text("no folder")
    with start(on_volume, key, "one") as owner:
        assert owner.stdout.readline() == "has it\n"
        owner.kill()
