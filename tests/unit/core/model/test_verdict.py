"""Every verdict as a golden text: read them, they are what a user gets."""

import signal
from dataclasses import replace

import pytest

from kit.values import worker_end
from torchmuster.core.model.failure import EndKind, ErrorParts, PythonError
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import (
    Circumstances,
    explain_failure,
    final_exit_code,
    notes_on_success,
)
from unit.core.model.ends import end_of, exited, killed, lost, preempted, raised, succeeded

LOG = "/runs/r/logs/main/train/attempt-1/rank-3.log"
GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:42467"
OOM = "the kernel killed 1 process because memory ran out in this control group since the attempt began"


def circumstances(**given):
    defaults = {
        "world_size": 4,
        "attempt": 1,
        "restarts_spent": 3,
        "max_restarts": 3,
        "same_as": None,
        "is_final": False,
        "early_ranks": (),
        "restart_hint": False,
        "log_path": LOG,
    }
    return Circumstances(**{**defaults, **given})


OWN = ErrorParts(
    at="World.loader",
    because=("rank 0: 100 samples", "rank 3: 101 samples"),
    hint="make it from the same files on all ranks",
)
NO_MORE = ErrorParts(at=None, because=(), hint=None)
ECHO = raised(0, "RuntimeError", GLOO)
CASES = {
    "exception": (raised(3, "ValueError", "bad batch"), [ECHO], {}),
    "same_bug": (
        raised(3, "ValueError", "bad batch", elapsed_s=1.0),
        [],
        {"same_as": 0, "restarts_spent": 1},
    ),
    "own_error": (
        raised(3, "DatasetError", "the dataset of rank 3 is not that of rank 0", own=OWN),
        [ECHO],
        {"same_as": 0, "restarts_spent": 1},
    ),
    "own_error_without_more": (
        raised(3, "UsageError", "resume() was called twice", own=NO_MORE),
        [],
        {"max_restarts": 0, "restarts_spent": 0},
    ),
    "all_in_the_same_line": (
        raised(3, "ValueError", "bad batch of 3"),
        [
            raised(0, "ValueError", "bad batch of 0"),
            raised(1, "ValueError", "bad batch of 1", asked=True),
            raised(2, "ValueError", "bad batch of 2", where="train.py:9"),
        ],
        {},
    ),
    "final": (
        raised(3, "SnapshotError", "no good snapshot", is_final=True),
        [],
        {"is_final": True, "restart_hint": True, "max_restarts": 0, "restarts_spent": 0},
    ),
    "exit_code": (exited(3, 3, tail=("epoch 1", "giving up")), [ECHO], {}),
    "silent_exit": (exited(3, 3), [], {"log_path": None, "max_restarts": 0, "restarts_spent": 0}),
    "sys_exit_with_words": (
        exited(3, 1, tail=("no data",)),
        [],
        {"restart_hint": True, "max_restarts": 0, "restarts_spent": 0},
    ),
    "sys_exit_within_an_except": (
        exited(
            3,
            1,
            error=PythonError(
                type_name="SystemExit",
                message="1",
                where="hydra/_internal/utils.py:9",
                traceback="ValueError: bad batch\n\nDuring handling ...\nSystemExit: 1",
                handled="ValueError: bad batch",
            ),
        ),
        [],
        {},
    ),
    "refused_line": (
        exited(3, 2, tail=("usage: fit.py [-h]", "fit.py: error: unrecognized arguments: --x")),
        [],
        {},
    ),
    "sigkill": (killed(3, signal.SIGKILL, tail=("epoch 7",)), [ECHO], {}),
    "out_of_memory": (killed(3, signal.SIGKILL, memory_evidence=OOM), [], {}),
    "segmentation_fault": (killed(3, signal.SIGSEGV), [], {}),
    "lost_node": (lost(2, "its agent has gone (the other side closed it)"), [ECHO], {}),
    "lost_for_its_memory": (
        lost(2, "its spawner ended (SIGKILL)", memory_evidence=OOM),
        [ECHO],
        {},
    ),
    "not_started": (end_of(3, EndKind.NOT_STARTED, detail="no such interpreter"), [], {}),
    "early_end": (ECHO, [succeeded(1), succeeded(2)], {"early_ranks": (1, 2)}),
    "many_consequences": (
        exited(3, 3),
        [raised(r, "RuntimeError", GLOO) for r in (0, 1, 2)] + [killed(5, signal.SIGABRT)],
        {"world_size": 6},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_reads_like_its_golden_text(name, golden):
    cause, others, given = CASES[name]

    report = explain_failure(cause, [cause, *others], circumstances(**given))

    golden("verdict.txt", name, render_report(report))


def test_the_cause_itself_is_not_among_its_consequences():
    cause = exited(3, 3)

    report = explain_failure(cause, [cause, exited(1, 3)], circumstances())

    assert "then rank 1: exit code 3" in report.because
    assert not any("3: exit" in line for line in report.because)


def test_ends_that_muster_asked_for_are_no_consequences():
    asked = killed(1, signal.SIGKILL, asked=True)

    report = explain_failure(exited(3, 3), [asked], circumstances())

    assert not any("then rank" in line for line in report.because)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (exited(0, 3), 3),
        (killed(0, signal.SIGKILL), 137),
        (raised(0, "ValueError"), 1),
        (succeeded(0), 1),
        (preempted(0), 1),
    ],
)
def test_a_failed_run_exits_as_its_worker_but_never_as_success_or_preempted(end, code):
    assert final_exit_code(end, first_cause_code=True) == code


def test_under_torchrun_a_failed_run_exits_with_1():
    assert final_exit_code(exited(0, 3), first_cause_code=False) == 1


def test_only_four_states_are_not_final():
    waiting = {state for state in RunState if not state.is_final}

    not_over = {RunState.STARTING, RunState.WAITING, RunState.RUNNING, RunState.UNKNOWN}
    assert waiting == not_over


def test_a_hang_is_told_with_where_it_stood_and_what_to_change():
    end = worker_end(
        EndKind.HANG,
        rank=2,
        detail="rank 2 stood still for 74 s while 3 ranks waited in all_reduce",
        error=PythonError(
            type_name="Hang", message="", where="data.py:88 in read", traceback="3 ranks wait"
        ),
    )
    report = explain_failure(end, [end], circumstances())
    assert report.error == "rank 2 stood still for 74 s while 3 ranks waited in all_reduce"
    assert report.at == "data.py:88 in read, rank 2 of 4 on n1, attempt 0"
    assert report.because == ("3 ranks wait",)
    assert "--hang-timeout" in report.hint
    assert final_exit_code(end, first_cause_code=True) == 1


def in_groups_of(*sizes):
    kind = EndKind.SUCCESS
    return [end_of(rank, kind, largest_group=size) for rank, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 0), (0, None), (None, None), (None, 1)])
def test_a_world_is_not_told_to_have_missed_itself_without_proof(sizes):
    assert notes_on_success(in_groups_of(*sizes), 2) == ()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            (0, 0),
            "2 workers never formed a process group: if this was training, each trained alone",
        ),
        (
            (1, 1),
            "2 workers never formed a process group: if this was training, each trained alone",
        ),
        (
            (2, 2, 2, 2),
            "4 workers never formed one process group, the largest had 2: if this was training, it was not one",
        ),
    ],
)
def test_a_world_that_never_met_is_told_of(sizes, words):
    assert notes_on_success(in_groups_of(*sizes), len(sizes)) == (words,)


def test_a_world_of_one_has_nobody_to_meet():
    assert notes_on_success(in_groups_of(0), 1) == ()


def test_deaths_after_a_good_end_are_named():
    died = [end_of(rank, EndKind.SUCCESS, signum=6) for rank in (1, 2)]
    (one,) = notes_on_success([succeeded(0), died[0]], 2)
    (both,) = notes_on_success([succeeded(0), *died], 3)
    assert one.startswith("rank 1 on n")
    assert " died of SIGABRT while its interpreter was exiting" in one
    assert both.startswith("ranks 1-2 died of SIGABRT while their interpreters were exiting")


@pytest.mark.parametrize("end", [exited(3, 3), killed(3, signal.SIGKILL)])
def test_no_log_is_named_of_a_rank_that_wrote_nothing(end):
    said, wrote = (
        explain_failure(e, [e], circumstances()).more for e in (end, replace(end, tail=("boom",)))
    )

    assert not [line for line in said if LOG in line]
    assert wrote[-1] == f"log: {LOG}"
