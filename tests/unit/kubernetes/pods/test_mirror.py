"""The client's copy of a run in pods: through a real door on this machine, which a pretended port-forward leads to."""

import contextlib
import hashlib
import json
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kit.ports import reserve_port
from kit.values import run_result
from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report, Result
from torchmuster.kubernetes.node.order import ENDED_FILE
from torchmuster.kubernetes.pods.mirror import RecordMirror, result_of_pod
from torchmuster.kubernetes.pods.reach import PodWatch, RunInPods, find_pod
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.node.remote.files import MARK_FILE
from unit.kubernetes.pods.conftest import (
    JOB_ID,
    NO_FORWARD,
    RUN_ID,
    SILENT,
    order_of,
    shown_pod,
)

RESULT = run_result(RunState.FAILED, 1, run_id=RUN_ID, elapsed_s=2.0)


class FakeFirstPod:
    """The door of a first pod whose owner the test plays, and the run directory on its disk."""

    def __init__(self, run_dir, folder, port):
        self.order = order_of(home=str(folder), port=port)
        self.path = path = str(folder / "order.json")
        os.makedirs(self.order.run_dir.logs)
        self.tell(self.order)
        os.chmod(run_dir.secret, 0o600)
        words = proc.node_program("pod", "--key", run_dir.secret, "--order", path)
        self.process = subprocess.Popen(
            words, env={**os.environ, "MUSTER_POD_INDEX": "1"}, stdout=subprocess.PIPE
        )
        assert b"sessions are served" in self.process.stdout.readline()

    def tell(self, order):
        """Give the pod an order."""
        self.order = order
        atomic.write_json(self.path, codec.to_plain(order))

    def write(self, **files):
        """Append to `events` or a log, by its name."""
        for name, text in files.items():
            own = self.order.run_dir
            path = own.events if name == "events" else os.path.join(own.logs, f"{name}.log")
            with open(path, "a") as file:
                file.write(text)

    def mark(self, text):
        """Say which disk this is."""
        Path(self.order.run_dir.path, MARK_FILE).write_text(text)

    def end(self, result):
        """End the run."""
        own = self.order.run_dir
        atomic.write_json(own.result, codec.to_plain(result))
        atomic.write_json(os.path.join(own.path, ENDED_FILE), {"code": 0})


@pytest.fixture
def pod(run_dir, cluster, tmp_path):
    """Return the first pod; the cluster knows it."""
    port = reserve_port()
    cluster.say(pods="job-pods-running", forward=port)
    found = FakeFirstPod(run_dir, tmp_path / "pod", port)
    found.mark("disk-1")
    yield found
    found.process.terminate()
    found.process.wait(30)
    found.process.stdout.close()


@pytest.fixture
def said():
    return []


def mirror_of(run_dir, order, said, shown=None):
    show = shown.append if shown is not None else (lambda _: None)
    return RecordMirror(RunInPods(run_dir, order, JOB_ID), PodWatch(JOB_ID), said.append, show)


@contextlib.contextmanager
def following(mirror):
    """Let the copy follow the run meanwhile."""
    mirror.start()
    try:
        yield mirror
    finally:
        mirror.stop()


def read(path):
    return Path(path).read_text()


def test_a_copy_goes_on_where_it_ended(run_dir, pod, said):
    pod.write(events='{"event": "a"}\n', rank="one\n")
    mirror_of(run_dir, pod.order, said).catch_up()
    pod.write(events='{"event": "b"}\n', rank="two\n")
    again = mirror_of(run_dir, pod.order, said)
    again.catch_up()

    assert read(run_dir.events) == '{"event": "a"}\n{"event": "b"}\n'
    assert read(os.path.join(run_dir.logs, "rank.log")) == "one\ntwo\n"
    assert (again.is_connected, again.is_complete, said) == (True, False, [])


def test_a_first_pod_with_an_empty_disk_begins_a_new_copy_and_the_old_one_is_kept(
    run_dir, pod, said
):
    pod.write(events='{"event": "old"}\n')
    mirror_of(run_dir, pod.order, said).catch_up()
    os.unlink(pod.order.run_dir.events)
    pod.mark("disk-2")
    pod.write(events='{"event": "new"}\n')
    mirror_of(run_dir, pod.order, said).catch_up()

    assert read(run_dir.events) == '{"event": "new"}\n'
    earlier = os.path.join(run_dir.path, "earlier")
    assert read(os.path.join(earlier, "1", "events.jsonl")) == '{"event": "old"}\n'
    (sentence,) = said
    assert sentence.endswith(f"with an empty disk: what came of the run before is in {earlier}")


def test_a_run_that_has_ended_leaves_its_result_here_with_our_paths(run_dir, pod, said):
    theirs = os.path.join(pod.order.run_dir.path, "logs", "main")
    report = Report(error="rank 0 failed", because=(f"its log is {theirs}/rank-0.log",))
    pod.write(events='{"event": "a"}\n')
    with following(mirror_of(run_dir, pod.order, said)) as mirror:
        wait_until(lambda: os.path.exists(run_dir.events), "the record")
        pod.end(replace(RESULT, report=report))
        wait_until(lambda: mirror.is_complete, "the end of the record")
    found = codec.from_plain(Result, json.loads(read(run_dir.result)))
    assert found.report.because == (f"its log is {run_dir.path}/logs/main/rank-0.log",)
    assert read(run_dir.events) == '{"event": "a"}\n'


def test_a_pod_that_does_not_run_yet_is_no_error(run_dir, cluster, said):
    cluster.say(pods="job-pods-fresh")
    mirror = mirror_of(run_dir, order_of(), said)
    mirror.catch_up()
    assert (mirror.is_connected, said) == (False, [])


def test_a_door_that_is_not_open_yet_changes_nothing_here(run_dir, cluster, said):
    port = reserve_port()  # nothing listens there
    cluster.say(pods="job-pods-running", forward=port)
    mirror = mirror_of(run_dir, order_of(port=port), said)
    mirror.catch_up()
    assert (mirror.is_connected, mirror.is_complete, said) == (False, False, [])
    assert not os.path.exists(run_dir.events)


def test_a_cluster_that_does_not_answer_is_an_error_for_who_wants_the_record_now(
    run_dir, cluster, said
):
    cluster.say(refuse={"get pods": SILENT})
    with pytest.raises(EngineError, match="does not answer in time"):
        mirror_of(run_dir, order_of(), said).catch_up()


def test_without_the_right_to_reach_pods_their_log_is_followed(run_dir, cluster, said):
    shown = []
    cluster.say(
        pods="job-pods-running",
        logs="muster: run on n1\nloss 2.0\n",
        refuse={"port-forward": NO_FORWARD},
    )
    with following(mirror_of(run_dir, order_of(), said, shown)):
        wait_until(lambda: len(shown) == 2, "two lines of the log")
    assert shown == ["muster: run on n1\n", "loss 2.0\n"]
    assert read(run_dir.job_log) == "".join(shown)
    (sentence,) = said
    assert sentence.startswith(
        "pods can't be reached from here, so their logs are followed instead"
    )
    assert 'resources: ["pods/portforward"], verbs: ["create"]' in sentence


def test_a_copy_that_waits_for_its_pod_ends_at_once(run_dir, cluster, said):
    cluster.say(pods="job-pods-fresh")
    before = set(threading.enumerate())
    with following(mirror_of(run_dir, order_of(), said)):
        wait_until(lambda: cluster.asked, "the first look")
    assert set(threading.enumerate()) <= before


def last_message(text):
    """Return an answer with one ended pod that has left this."""
    pod = shown_pod({"terminated": {"exitCode": 113, "reason": "Error", "message": text}})
    return {"get pods": {"items": [pod]}}


def test_the_last_message_of_the_first_pod_is_the_result_where_no_record_came(run_dir, cluster):
    text = json.dumps(codec.to_plain(RESULT))
    cluster.say(answers=last_message(text))
    assert result_of_pod(find_pod(JOB_ID, 0), run_dir) == RESULT


def test_an_error_before_there_was_a_run_is_its_result(run_dir, cluster):
    cluster.say(pods="job-pods-other-user")
    found = result_of_pod(find_pod(JOB_ID, 0), run_dir)
    assert (found.run_id, found.state, found.exit_code) == (RUN_ID, RunState.FAILED, 14)
    assert found.report.error == "the image's Python can't be started again"
    assert found.report.at.startswith("pod run-7f3a-0-")


@pytest.mark.parametrize("text", ["", "no json", "[1]", '{"state": "odd"}', "{", "3", "null"])
def test_a_last_message_of_somebody_else_is_no_result(run_dir, cluster, text):
    cluster.say(answers=last_message(text))
    assert result_of_pod(find_pod(JOB_ID, 0), run_dir) is None


def test_a_pod_that_runs_has_left_nothing(run_dir, cluster):
    cluster.say(pods="job-pods-running")
    assert result_of_pod(find_pod(JOB_ID, 0), run_dir) is None


def test_a_pod_can_not_replace_what_the_client_acts_upon(run_dir, pod, said):
    atomic.write_json(run_dir.job, {"job_id": "lab/research/mine"})
    for name in ("job.json", "other.json"):
        Path(pod.order.run_dir.path, name).write_text('{"job_id": "lab/research/somebody-elses"}')
    pod.end(RESULT)
    mirror_of(run_dir, pod.order, said).catch_up()

    assert json.loads(read(run_dir.job)) == {"job_id": "lab/research/mine"}
    assert "somebody" in read(os.path.join(run_dir.path, "other.json"))


@pytest.mark.parametrize("has_it", [True, False])
def test_code_that_a_volume_has_is_not_sent_again(run_dir, pod, said, has_it):
    code = b"x" * 5000
    order = replace(
        pod.order, code_bytes=len(code), code_sha=hashlib.sha256(code).hexdigest(), has_volume=True
    )
    Path(run_dir.path, "pods", "code.tar.gz").write_bytes(code)
    os.makedirs(os.path.dirname(order.kept))
    Path(order.kept).write_bytes(code[: None if has_it else -1])
    pod.tell(order)

    mirror_of(run_dir, order, said).catch_up()

    assert os.path.exists(order.archive) is not has_it
    assert has_it or read(order.archive) == code.decode()
