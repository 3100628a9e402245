"""What the head of a run saw is stronger than what its logs look like."""

import os
from dataclasses import replace

import pytest

from kit.records import event, start
from kit.values import run_result, worker_end
from torchmuster.core.model.failure import EndKind, PythonError
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import CAUSES
from torchmuster.diagnose.explain.events import JobOutcome
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.own_run import cause_of_end, finding_of, with_own_result
from torchmuster.diagnose.logs import read_logs
from torchmuster.errors import HeadLostError
from torchmuster.launcher.model.run import fold_run
from unit.diagnose.explain.logs import explain, traceback_of


def end(kind=EndKind.EXCEPTION, **more):
    return worker_end(kind, rank=1, node="n2", elapsed_s=9.0, **more)


def result(
    state=RunState.FAILED, cause=None, error="rank 1 raised ValueError: bad label", because=()
):
    report = Report(
        error=error, at="train.py:9, rank 1 of 2 on n2, attempt 0", because=because, hint="see logs"
    )
    return run_result(state, 1, run_id="r-1", elapsed_s=10.0, report=report, cause=cause)


def joined(verdict, result, lines=(), **more):
    return with_own_result(verdict, result, fold_run(lines), **more)


VALUE_ERROR = PythonError(
    type_name="ValueError", message="bad label", where="train.py:9", traceback=""
)


def test_head_s_first_cause_comes_before_that_of_the_logs(tmp_path):
    verdict = explain(tmp_path, n1=traceback_of("KeyError: 'a later one'", rank=0))
    own = joined(verdict, result(cause=end(error=VALUE_ERROR)))
    assert own.first.error == "rank 1 raised ValueError: bad label"
    assert own.first.confidence.value == "high"
    assert own.first.at.endswith("attempt 0")


def test_evidence_of_the_logs_is_kept_where_it_is_of_the_same_end(tmp_path):
    verdict = explain(tmp_path, n2=traceback_of("ValueError: bad label", rank=1))
    own = joined(verdict, result(cause=end(error=VALUE_ERROR)))
    assert own.first.evidence == verdict.first.evidence
    assert len(own.found) == 1


def test_line_without_a_second_reading_gives_the_better_word(tmp_path):
    error = "OSError: [Errno 28] No space left on device: '/scratch/a.pt'"
    verdict = explain(tmp_path, n2=traceback_of(error, rank=1))
    own = joined(verdict, result(cause=end(), error="rank 1 raised OSError", because=(error,)))
    assert own.first.cause == "disk-full"
    assert "make room" in own.first.hint
    assert own.first.error == "rank 1 raised OSError"


def test_run_that_succeeded_is_healthy_whatever_its_logs_say(tmp_path):
    verdict = explain(tmp_path, n1=traceback_of("ValueError: caught"))
    assert joined(verdict, result(RunState.SUCCEEDED)).healthy


def test_run_that_still_runs_is_said_to(tmp_path):
    verdict = explain(tmp_path, n1="step 1\n")
    own = joined(verdict, None, state=RunState.RUNNING)
    assert own.outcome is JobOutcome.RUNNING


def test_number_of_attempts_is_said(tmp_path):
    verdict = explain(tmp_path, n1=traceback_of("ValueError: x"))
    own = joined(verdict, result(cause=end()), [start(n, n) for n in range(3)])
    assert "the run made 3 attempts" in own.notes


def test_slow_rank_is_said_beside_a_healthy_run(tmp_path):
    verdict = explain(tmp_path, n1="step 1\n")
    words = [f"rank 1 on n2 is {n} % slower" for n in (30, 40)]
    slow = [event(0, "straggler", rank=1, text=text) for text in words]
    own = joined(verdict, result(RunState.SUCCEEDED), slow)
    assert own.healthy
    assert own.notes == ("rank 1 on n2 is 40 % slower",)


def test_head_that_ended_is_a_failed_node():
    ended = replace(result(error="the head's agent ended"), exit_code=HeadLostError.exit_code)
    assert finding_of(ended, RunState.FAILED).cause == "node-failed"


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        (end(), "exception"),
        (end(EndKind.EXIT_CODE, exit_code=3), "exit-code"),
        (end(EndKind.SIGNAL, signum=9), "killed"),
        (end(EndKind.SIGNAL, signum=9, memory_evidence="oom_kill rose by 1"), "out-of-memory"),
        (end(EndKind.SIGNAL, signum=11), "segfault"),
        (end(EndKind.SIGNAL, signum=1), "hangup"),
        (end(EndKind.SIGNAL, signum=31), "signal"),
        (end(EndKind.NODE_LOST), "node-failed"),
        (end(EndKind.NOT_STARTED), "launch-failed"),
        (end(EndKind.PREEMPTED), "preempted"),
        (
            end(EndKind.HANG, detail="rank 1 stood still for 9 s while 1 rank waited in barrier"),
            "rank-missing-in-collective",
        ),
        (
            end(
                EndKind.HANG, detail="rank 1 waited in recv for 9 s while 1 rank waited in barrier"
            ),
            "collectives-differ",
        ),
    ],
)
def test_every_kind_of_end_has_a_word(cause, word):
    assert cause_of_end(cause) == word
    assert word in CAUSES


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (RunState.CANCELLED, "cancelled"),
        (RunState.PREEMPTED, "preempted"),
        (RunState.LOST, "node-failed"),
    ],
)
def test_end_without_a_worker_has_a_word(state, word):
    assert finding_of(None, state).cause == word


def test_run_of_which_nothing_is_known_is_judged_by_its_logs(tmp_path):
    verdict = explain(tmp_path, n1=traceback_of("ValueError: x"))
    assert joined(verdict, None) is verdict


HUNG = "3 ranks wait in all_reduce (hang.py:15); rank 3 waits in all_gather (hang.py:13)"


def test_run_that_is_alive_is_running_whatever_its_logs_lack_or_suggest(tmp_path):
    for text in ("", "frobnicator: error: no such widget\n"):
        own = joined(explain(tmp_path, n1=text), None, state=RunState.RUNNING)
        assert own.outcome is JobOutcome.RUNNING
        assert not own.collect


def test_recorded_hang_is_told_of_a_run_that_is_alive(tmp_path):
    verdict = explain(tmp_path, **{"stacks-0": HUNG})
    hang = event(0, "hang", text=f"{HUNG}: if nothing moves, the attempt ends in 10 s")
    own = joined(verdict, None, [hang], state=RunState.RUNNING)
    assert any(HUNG in note for note in own.notes)
    assert own.healthy


def test_recorded_cause_leaves_no_room_for_stacks_and_lost_connections(tmp_path):
    lost = traceback_of(
        "RuntimeError: [x/pair.cc:5] Connection closed by peer [10.7.7.2]:1.", rank=0
    )
    explain(tmp_path, n1=lost, **{"stacks-0": HUNG})
    os.rename(tmp_path / "stacks-0.log", tmp_path / "stacks-0.txt")
    verdict = judge(Case(read_logs([str(tmp_path)], year=2026)))
    assert {one.cause for one in verdict.found} == {"peer-lost", "collectives-differ"}
    own = joined(verdict, result(cause=end(error=VALUE_ERROR)))
    assert len(own.found) == 1


def test_owner_that_has_gone_is_known(tmp_path):
    verdict = explain(
        tmp_path, n1="error: the owner of this run has gone, so its workers were ended\n"
    )
    own = joined(verdict, None, state=RunState.LOST)
    assert len(own.found) == 1
    assert "--detach" in own.first.hint
