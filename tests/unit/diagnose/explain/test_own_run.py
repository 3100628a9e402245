"""What the head of a run saw is stronger than what its logs look like."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kit.records import event, lines, start
from kit.values import run_result, worker_end
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.failure import EndKind, PythonError
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.diagnose.explain import own_run
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import CAUSES
from torchmuster.diagnose.explain.events import JobOutcome, LogFinding, LogVerdict
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.own_run import (
    as_values,
    cause_of_end,
    finding_of,
    render_verdict,
    report_of,
    with_own_result,
    with_script,
)
from torchmuster.diagnose.finding import Confidence, Finding, Level
from torchmuster.diagnose.logs import read_logs
from torchmuster.errors import HeadLostError
from torchmuster.launcher.model.run import fold_run
from unit.diagnose.explain.logs import PEER, explain, traceback_of

RAISED = "rank 1 raised ValueError: bad label"


def end(kind=EndKind.EXCEPTION, **more):
    return worker_end(kind, rank=1, node="n2", elapsed_s=9.0, **more)


def result(state=RunState.FAILED, cause=None, error=RAISED, because=()):
    at = "train.py:9, rank 1 of 2 on n2, attempt 0"
    report = Report(error=error, at=at, because=because, hint="see logs")
    return run_result(state, 1, run_id="r-1", elapsed_s=10.0, report=report, cause=cause)


def joined(verdict, result, lines=(), **more):
    return with_own_result(verdict, result, fold_run(lines), **more)


STOOD_STILL = "rank 1 stood still for 9 s while 1 rank waited in barrier"
IN_RECV = "rank 1 waited in recv for 9 s while 1 rank waited in barrier"


def test_head_s_first_cause_comes_before_that_of_the_logs(tmp_path):
    verdict = explain(tmp_path, n1=traceback_of("KeyError: 'a later one'", rank=0))
    own = joined(verdict, result(cause=raised("ValueError: bad label")))
    assert own.first.error == RAISED
    assert own.first.confidence.value == "high"
    assert own.first.at.endswith("attempt 0")


def test_evidence_of_the_logs_is_kept_where_it_is_of_the_same_end(tmp_path):
    verdict = explain(tmp_path, n2=traceback_of("ValueError: bad label", rank=1))
    own = joined(verdict, result(cause=raised("ValueError: bad label")))
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
        (end(EndKind.HANG, detail=STOOD_STILL), "rank-missing-in-collective"),
        (end(EndKind.HANG, detail=IN_RECV), "collectives-differ"),
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
    (tmp_path / "n1.log").write_text(traceback_of(PEER, rank=0))
    (tmp_path / "stacks-0.txt").write_text(HUNG)
    verdict = judge(Case(read_logs([str(tmp_path)], year=2026)))
    assert {one.cause for one in verdict.found} == {"peer-lost", "collectives-differ"}
    own = joined(verdict, result(cause=raised("ValueError: bad label")))
    assert len(own.found) == 1


def test_owner_that_has_gone_is_known(tmp_path):
    log = "error: the owner of this run has gone, so its workers were ended\n"
    own = joined(explain(tmp_path, n1=log), None, state=RunState.LOST)
    assert len(own.found) == 1
    assert "--detach" in own.first.hint


# What the logs add to the head's report: a reason where it has none, soon, or nothing.


DISK = "cp: error writing '/scratch/x': No space left on device\n"
STORE = "torch.distributed.DistNetworkError: The client socket has timed out after 3000ms while trying to connect to (n1, 29400)."


EXIT_3 = end(EndKind.EXIT_CODE, exit_code=3)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Let the reading take more time than any machine needs."""
    monkeypatch.setattr(own_run, "_READ_LIMIT_S", 3600.0)


def explained(result, folder, *, limit_s=60.0):
    return own_run.explained(result, folder, limit_s=limit_s)


def raised(words, traceback="Traceback"):
    name, _, message = words.partition(": ")
    error = PythonError(type_name=name, message=message, where="train.py:9", traceback=traceback)
    return end(error=error)


def result_of(cause, *, state=RunState.FAILED, because=("its last lines:",)):
    return result(state, cause, "rank 1 ended with exit code 3", because)


@pytest.fixture
def run_dir(tmp_path):
    def make(*logs, master="10.0.0.1:4000"):
        folder = RunDir(str(tmp_path))
        os.makedirs(os.path.join(folder.logs, "attempt-0"))
        for rank, text in enumerate(logs):
            with open(os.path.join(folder.logs, "attempt-0", f"rank-{rank}.log"), "w") as file:
                file.write(text)
        lines(folder.events, [{**start(0, 0), "master": master}])
        return folder

    return make


def test_first_line_stays_the_head_s_and_the_reason_comes_next(run_dir):
    report = explained(result_of(EXIT_3), run_dir("step 1\n", "step 1\n" + DISK))
    assert report.error == "rank 1 ended with exit code 3"
    assert "disk is full" in report.because[0]
    assert "rank-1.log:2: cp: error writing" in report.because[1]
    assert report.because[-1] == "its last lines:"
    assert report.hint.endswith("see logs")
    assert "make room" in report.hint


def test_line_behind_a_long_log_has_its_own_number(run_dir):
    text = "".join(f"step {k} of a long run without any news\n" for k in range(60_000))
    report = explained(result_of(EXIT_3), run_dir("", text + DISK))
    assert "rank-1.log:60001: cp: error" in report.because[1]


def test_of_a_very_long_log_the_end_is_read_and_said_to_be_the_end(run_dir):
    folder = run_dir("", "")
    path = os.path.join(folder.logs, "attempt-0", "rank-1.log")
    with open(path, "w") as file:
        file.truncate(3 << 30)  # with a hole: no such room is taken
        file.seek(0)
        file.write("step 1\n" * 20_000)
        file.seek(0, os.SEEK_END)
        file.write("\n" + DISK)
    before = bytes_read()
    report = explained(result_of(EXIT_3), folder)
    assert bytes_read() - before < 16 << 20
    assert "rank-1.log, last 512 KiB:" in report.because[1]


def bytes_read():
    """Return how much this process has read so far. Source: proc(5), rchar."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_report_comes_in_time_and_plain_when_the_disk_does_not_answer(run_dir, monkeypatch):
    released = threading.Event()

    def hang(*_):
        released.wait(30.0)
        return iter(())

    monkeypatch.setattr(own_run, "first_and_last", hang)
    result = result_of(EXIT_3)
    try:
        assert explained(result, run_dir("", DISK), limit_s=0.05) is result.report
    finally:
        released.set()


def test_bug_of_ours_leaves_the_report_and_one_line(run_dir, monkeypatch):
    def broken(*_):
        raise KeyError("oops")

    monkeypatch.setattr(own_run, "first_and_last", broken)
    report = explained(result_of(EXIT_3), run_dir("", DISK))
    assert report.because == (
        "its last lines:",
        "the logs could not be explained (KeyError: 'oops')",
    )


@pytest.mark.parametrize(
    "cause",
    [
        end(EndKind.SIGNAL, signum=9, memory_evidence="oom_kill rose by 1"),
        end(EndKind.NODE_LOST),
        end(EndKind.HANG),
        raised("ValueError: bad label"),
        None,
    ],
)
def test_what_the_head_knows_better_is_left_as_it_is(run_dir, cause):
    result = result_of(cause)
    assert explained(result, run_dir("", DISK)) is result.report


@pytest.mark.parametrize("state", [RunState.SUCCEEDED, RunState.CANCELLED, RunState.PREEMPTED])
def test_run_that_did_not_fail_is_not_explained(run_dir, state):
    result = result_of(EXIT_3, state=state)
    assert explained(result, run_dir("", DISK)) is result.report


def test_victim_of_another_rank_gets_that_rank_s_reason(run_dir):
    logs = run_dir(traceback_of("ValueError: bad label 7", rank=0), traceback_of(PEER, rank=1))
    report = explained(result_of(raised(PEER), because=(PEER,)), logs)
    assert report.because[0] == "rank 0 failed first: ValueError: bad label 7"
    assert "rank-0.log:4" in report.because[1]


def test_ranks_that_only_say_that_others_have_gone_give_no_reason(run_dir):
    result = result_of(raised(PEER), because=(PEER,))
    assert explained(result, run_dir(PEER + "\n", PEER + "\n")) is result.report


def test_call_of_another_store_is_named_with_the_right_one(run_dir):
    cause = raised(STORE, "in _create_c10d_store")
    report = explained(result_of(cause, because=(STORE,)), run_dir("", STORE + "\n"))
    assert "calls a store at n1:29400; the launcher's is at 10.0.0.1:4000" in report.because[0]


def test_call_of_the_right_store_is_not_taken_for_another(run_dir):
    cause = raised(STORE, "in _create_c10d_store")
    logs = run_dir("", STORE + "\n", master="n1:29400")
    report = explained(result_of(cause, because=(STORE,)), logs)
    assert not any("the launcher's is at" in line for line in report.because)


def test_run_without_logs_keeps_its_report(tmp_path):
    result = result_of(EXIT_3)
    assert explained(result, RunDir(str(tmp_path))) is result.report


def test_logs_that_were_not_read_in_time_are_counted(run_dir, monkeypatch):
    monkeypatch.setattr(own_run, "MAX_RANKS", 2)
    report = explained(result_of(EXIT_3), run_dir("step 1\n", DISK, "step 1\n"))
    assert "disk is full" in report.because[0]
    assert report.because[-1] == "2 of 3 logs were looked at; `muster explain r-1` reads all"


def test_a_report_that_a_job_has_explained_is_not_explained_again(run_dir):
    folder, result = run_dir("step 1\n", "step 1\n" + DISK), result_of(EXIT_3)
    once = explained(result, folder)
    assert once != result.report
    assert explained(replace(result, report=once), folder) == once


# What the user reads, and what a script reads.


def test_verdict_has_cause_place_evidence_cure_and_confidence(tmp_path):
    text = render_verdict(explain(tmp_path, n2=traceback_of("ValueError: bad label", rank=1)))
    for part in ("error: ", "  at: ", "  because: ", "hint: ", "confidence: medium", "n2.log:4"):
        assert part in text


@pytest.mark.parametrize(
    ("confidence", "begins"),
    [
        (Confidence.HIGH, "the "),
        (Confidence.MEDIUM, "probable cause: the "),
        (Confidence.LOW, "possible cause: the "),
    ],
)
def test_a_doubt_is_said_in_the_first_words(tmp_path, confidence, begins):
    log = "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    found = explain(tmp_path, n1=log).first
    doubted = replace(found, error="the GPU is broken", cause="gpu-hardware", confidence=confidence)
    assert report_of(doubted).error == f"{begins}GPU is broken"


def test_what_was_raised_is_a_fact_whatever_led_to_it(tmp_path):
    found = explain(tmp_path, n2=traceback_of("ValueError: bad label", rank=1)).first
    assert found.confidence is Confidence.MEDIUM
    assert report_of(found).error == found.error


def test_healthy_logs_are_said_to_be(tmp_path):
    text = render_verdict(explain(tmp_path, n1="step 1\nstep 2\ntraining finished\n"))
    assert "no failure was found in 3 lines in 1 file" in text


def test_unknown_failure_says_what_to_collect(tmp_path):
    log = "srun: error: n1: task 0: Exited with exit code 1\n"
    assert "look at" in render_verdict(explain(tmp_path, n1=log))


def test_values_are_plain_json(tmp_path):
    values = as_values(explain(tmp_path, n1=traceback_of("ValueError: x")))
    assert json.loads(json.dumps(values))["found"][0]["cause"] == "exception"


# What lint finds in the job's script is evidence for what the logs show.


def found(cause, confidence=Confidence.LOW):
    return LogFinding(cause=cause, error="x", confidence=confidence, hint="from the logs")


def script(cause, level=Level.FAILURE):
    finding = Finding(cause=cause, error="torchrun runs on one node", hint="srun it", level=level)
    return [("job.sh", 7, finding)]


def test_a_mistake_of_the_script_that_leads_to_the_cause_makes_it_surer_and_gives_the_advice():
    logs = LogVerdict(found=(found("launcher-on-too-few-nodes"),))
    verdict = with_script(logs, script("head-only"))
    assert verdict.first.confidence is Confidence.MEDIUM
    assert verdict.first.hint == "srun it"
    assert "job.sh:7: torchrun runs on one node" in verdict.first.because


def test_where_logs_name_nothing_the_script_does():
    verdict = with_script(LogVerdict(found=(), outcome=JobOutcome.UNKNOWN), script("head-only"))
    assert verdict.first.cause == "launcher-on-too-few-nodes"
    assert verdict.first.at == "job.sh:7"


def test_a_cause_that_the_logs_prove_stays():
    verdict = LogVerdict(found=(found("disk-full", Confidence.HIGH),))
    assert with_script(verdict, script("head-only")) == verdict


@pytest.mark.parametrize("outcome", [JobOutcome.ENDED_WELL, JobOutcome.RUNNING])
def test_a_job_that_did_not_fail_is_not_accused_by_its_script(outcome):
    verdict = LogVerdict(found=(), outcome=outcome)
    assert with_script(verdict, script("head-only")) == verdict


def test_a_warning_alone_is_no_cause():
    verdict = LogVerdict(found=(), outcome=JobOutcome.UNKNOWN)
    assert with_script(verdict, script("fixed-port", Level.WARNING)) == verdict
