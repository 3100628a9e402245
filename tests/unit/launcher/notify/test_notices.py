"""Which events are worth a notice."""

import pytest

from kit.values import worker_end
from torchmuster.core.model import events
from torchmuster.core.model.events import Stamped
from torchmuster.launcher.model import events as parts
from torchmuster.launcher.notify.watcher import Notices

RUN = "20260101-000000-train-ab12"
ANSWER = {
    "state": "failed",
    "cause": "rank 1 raised KeyError: 'label'",
    "at": "train.py:3, rank 1 of 2 on n1, attempt 1",
    "rank": 1,
    "node": "n1",
    "hint": "look at the collate function",
    "next": "muster report train-ab12",
    "attempts": 2,
    "elapsed_s": 75.0,
}


@pytest.fixture
def notices():
    return Notices(RUN, "login1", 1800.0, 1000.0)


def hear(notices, at, event):
    return notices.hear(Stamped("", at, event))


def failed(attempt, left):
    end = worker_end(attempt=attempt, rank=3, local_rank=1, node="n2", signum=9)
    what = "SIGKILL in rank 3 on n2"
    return events.AttemptFailedEvent(attempt=attempt, what=what, cause=end, restarts_left=left)


def test_a_failed_attempt_is_told_once_unless_the_end_follows(notices):
    (one,) = hear(notices, 1001.0, failed(0, 2))
    assert one.as_plain() == {
        "text": "muster: train-ab12 attempt 0 failed: SIGKILL in rank 3 on n2; 2 restarts left\n"
        "next: muster logs train-ab12 --rank 3",
        "id": f"{RUN}/attempt-0-failed",
        "kind": "attempt",
        "at": 1001.0,
        "run": RUN,
        "host": "login1",
        "cause": "SIGKILL in rank 3 on n2",
        "rank": 3,
        "node": "n2",
        "next": "muster logs train-ab12 --rank 3",
    }
    assert hear(notices, 1002.0, failed(0, 2)) == []
    assert hear(notices, 1003.0, failed(1, None)) == []


def test_an_attempt_without_a_recorded_failure_before_it_is_told_as_a_restart(notices):
    assert hear(notices, 1.0, events.AttemptStartedEvent(attempt=0)) == []
    hear(notices, 2.0, failed(0, 1))
    assert hear(notices, 3.0, events.AttemptStartedEvent(attempt=1, why="after SIGKILL")) == []
    for attempt in (2, 3, 4):
        why = "the head was lost"
        (one,) = hear(notices, 4.0, events.AttemptStartedEvent(attempt=attempt, why=why))
        assert (one.kind, one.facts["cause"]) == ("restart", why)
        assert hear(notices, 4.5, events.AttemptStartedEvent(attempt=attempt, why=why)) == []


def test_a_wait_is_told_once_and_again_only_after_workers_have_run(notices):
    assert notices.look(2799.0) == []
    (one,) = notices.look(2800.0)
    assert one.text.startswith("muster: train-ab12 has waited for 30 min without workers: its job")
    assert notices.look(9999.0) == []
    hear(notices, 10000.0, events.WorkersStartedEvent(attempt=0))
    assert notices.look(99999.0) == []
    hear(notices, 100000.0, failed(0, 2))
    missing = (events.MissingNode(node="n2", why="not heard of"),)
    hear(notices, 100001.0, events.WaitingEvent(missing=missing, num_missing=1, wanted=2))
    (again,) = notices.look(101800.0)
    assert "n2 (not heard of)" in again.text


def test_a_job_that_was_put_back_into_the_queue_waits_again(notices):
    hear(notices, 1001.0, events.WorkersStartedEvent(attempt=0))
    hear(notices, 2000.0, events.RunEndedEvent())
    assert notices.look(3000.0) == []
    assert notices.look(3800.0)


def test_each_hang_of_an_attempt_is_told_once(notices):
    hang = parts.HangEvent(text="rank 1 stands still", attempt=0, rank=1, node="n1")
    (one,) = hear(notices, 5.0, hang)
    assert (one.kind, one.facts["next"]) == ("hang", "muster stacks train-ab12")
    assert hear(notices, 6.0, hang) == []
    assert hear(notices, 7.0, parts.StartWaitEvent(text="ranks 1-3 wait for rank 0"))


def test_the_end_has_the_cure_and_what_to_type(notices):
    one = notices.end(ANSWER, 1100.0, 2)
    assert one.text.splitlines() == [
        "muster: train-ab12 failed after 1 min 15 s: rank 1 raised KeyError: 'label'",
        "at: train.py:3, rank 1 of 2 on n1, attempt 1",
        "hint: look at the collate function",
        "next: muster report train-ab12",
    ]
    assert one.id == f"{RUN}/end-2"
    assert one.facts["state"] == "failed"


def test_a_workflow_and_a_sweep_have_no_workers_to_wait_for():
    notices = Notices(RUN, "login1", 60.0, 0.0)
    hear(notices, 1.0, events.StartedEvent())

    assert notices.look(1e6) == []
