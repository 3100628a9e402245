"""Every verdict as a golden text: read them, they are what a user gets."""

import signal
from dataclasses import replace

import pytest

from kit.values import worker_end
from torchmuster.core.model import verdict
from torchmuster.core.model.failure import OVERUSED, EndKind, ErrorParts, PythonError
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import render_report
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
    return verdict.Circumstances(**{**defaults, **given})


OWN = ErrorParts(
    at="World.loader",
    because=("rank 0: 100 samples", "rank 3: 101 samples"),
    hint="make it from the same files on all ranks",
)
NO_MORE = ErrorParts(at=None, because=(), hint=None)
ONE_TRY = {"max_restarts": 0, "restarts_spent": 0}
SECOND = {"same_as": 0, "restarts_spent": 1}
ECHO = raised(0, "RuntimeError", GLOO)
CASES = {
    "exception": (raised(3, "ValueError", "bad batch"), [ECHO], {}),
    "same_bug": (raised(3, "ValueError", "bad batch", elapsed_s=1.0), [], SECOND),
    "own_error": (
        raised(3, "DatasetError", "the dataset of rank 3 is not that of rank 0", own=OWN),
        [ECHO],
        SECOND,
    ),
    "own_error_without_more": (
        raised(3, "UsageError", "resume() was called twice", own=NO_MORE),
        [],
        ONE_TRY,
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
        {"is_final": True, "restart_hint": True, **ONE_TRY},
    ),
    "exit_code": (exited(3, 3, tail=("epoch 1", "giving up")), [ECHO], {}),
    "silent_exit": (exited(3, 3), [], {"log_path": None, **ONE_TRY}),
    "sys_exit_with_words": (exited(3, 1, tail=("no data",)), [], {"restart_hint": True, **ONE_TRY}),
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

    report = verdict.explain_failure(cause, [cause, *others], circumstances(**given))

    golden("verdict.txt", name, render_report(report))


def test_neither_the_cause_nor_what_muster_asked_for_is_a_consequence():
    cause, asked = exited(3, 3), killed(2, signal.SIGKILL, asked=True)

    report = verdict.explain_failure(cause, [cause, exited(1, 3), asked], circumstances())

    told = [line for line in report.because if "then rank" in line]
    assert told == ["then rank 1: exit code 3"]


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
    assert verdict.final_exit_code(end, first_cause_code=True) == code


def test_under_torchrun_a_failed_run_exits_with_1():
    assert verdict.final_exit_code(exited(0, 3), first_cause_code=False) == 1


def test_only_four_states_are_not_final():
    not_over = {RunState.STARTING, RunState.WAITING, RunState.RUNNING, RunState.UNKNOWN}
    assert {state for state in RunState if not state.is_final} == not_over


def test_a_hang_is_told_with_where_it_stood_and_what_to_change():
    end = worker_end(
        EndKind.HANG,
        rank=2,
        detail="rank 2 stood still for 74 s while 3 ranks waited in all_reduce",
        error=PythonError(
            type_name="Hang", message="", where="data.py:88 in read", traceback="3 ranks wait"
        ),
    )
    report = verdict.explain_failure(end, [end], circumstances())
    assert report.error == "rank 2 stood still for 74 s while 3 ranks waited in all_reduce"
    assert report.at == "data.py:88 in read, rank 2 of 4 on n1, attempt 0"
    assert report.because == ("3 ranks wait",)
    assert "--hang-timeout" in report.hint
    assert verdict.final_exit_code(end, first_cause_code=True) == 1


ALONE = "never formed a process group: if this was training, each trained alone"
APART = "never formed one process group, the largest had 2: if this was training, it was not one"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        *((sizes, ()) for sizes in [(2, 2), (2, 0), (0, None), (None, None), (None, 1)]),
        ((0, 0), (f"2 workers {ALONE}",)),
        ((1, 1), (f"2 workers {ALONE}",)),
        ((2, 2, 2, 2), (f"4 workers {APART}",)),
        ((0,), ()),
    ],
)
def test_only_a_world_that_surely_never_met_is_told_of(sizes, words):
    ends = [end_of(rank, EndKind.SUCCESS, largest_group=size) for rank, size in enumerate(sizes)]
    assert verdict.notes_on_success(ends, len(sizes)) == words


def test_deaths_after_a_good_end_are_named():
    died = [end_of(rank, EndKind.SUCCESS, signum=6) for rank in (1, 2)]
    (one,) = verdict.notes_on_success([succeeded(0), died[0]], 2)
    (both,) = verdict.notes_on_success([succeeded(0), *died], 3)
    assert one.startswith("rank 1 on n")
    assert " died of SIGABRT while its interpreter was exiting" in one
    assert both.startswith("ranks 1-2 died of SIGABRT while their interpreters were exiting")


@pytest.mark.parametrize("end", [exited(3, 3), killed(3, signal.SIGKILL)])
def test_no_log_is_named_of_a_rank_that_wrote_nothing(end):
    both = (end, replace(end, tail=("boom",)))
    said, wrote = (verdict.explain_failure(one, [one], circumstances()).more for one in both)

    assert not [line for line in said if LOG in line]
    assert wrote[-1] == f"log: {LOG}"


# Whether another attempt could mend it, and whether it is the same failure as before.


def hung(message="rank 1 stood still for 90 s", bases=("Hang",), **more):
    end = raised(1, "Hang", message, bases=bases, **more)
    return replace(end, kind=EndKind.HANG)


PERMANENT_ENDS = [
    raised(0, "SyntaxError", "invalid syntax"),
    raised(0, "IndentationError", "unexpected indent", bases=("IndentationError", "SyntaxError")),
    raised(0, "ModuleNotFoundError", "No module named 'numpyy'"),
    raised(0, "ImportError", "cannot import name 'x'"),
    raised(0, "NameError", "name 'modle' is not defined"),
    raised(0, "UnboundLocalError", "x", bases=("UnboundLocalError", "NameError", "Exception")),
    raised(0, "SnapshotError", is_final=True),
    raised(0, "OSError", is_final=True),
    raised(0, "EOFError", "EOF when reading a line"),
    raised(0, "RuntimeError", "Distributed package doesn't have NCCL built in"),
]
ONCE_MORE = [
    raised(0, "AttributeError", "module 'torch.nn' has no attribute 'CrossEntropyLos'"),
    raised(0, "TypeError"),
    raised(0, "ValueError"),
    raised(0, "KeyError"),
    raised(0, "AssertionError"),
    raised(0, "RuntimeError", "shapes can't be multiplied"),
    raised(0, "RuntimeError", "Default process group has not been initialized"),
    raised(0, "mine.OwnError", "no"),
    raised(0, "FileNotFoundError", "[Errno 2]", bases=("FileNotFoundError", "OSError")),
    raised(0, "PermissionError", "[Errno 13]", bases=("PermissionError", "OSError")),
    raised(0, "FileExistsError", "[Errno 17]", bases=("FileExistsError", "OSError")),
    raised(0, "OSError", "[Errno 122] Disk quota exceeded: 'last.pt'"),
    raised(0, "EOFError", "Ran out of input"),
    raised(0, "RuntimeError", "DataLoader worker (pid(s) 812, 813) exited unexpectedly"),
    raised(0, "RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
    killed(0, signal.SIGABRT, tail=("Is there a distributed collective mismatch in your code?",)),
    hung(),
    exited(0, 3),
    preempted(0),
    lost(0, OVERUSED),
]
UP_TO_THE_BUDGET = [
    raised(0, "OSError", "[Errno 5] Input/output error"),
    raised(0, "ConnectionError"),
    raised(0, "requests.exceptions.HTTPError", bases=("HTTPError", "RequestException", "OSError")),
    raised(0, "TimeoutError"),
    raised(0, "mine.LicenceError", bases=("LicenceError", "ConnectionError", "OSError")),
    raised(0, "torch.distributed.DistBackendError", "NCCL error"),
    raised(0, "torch.distributed.DistNetworkError"),
    raised(0, "torch.OutOfMemoryError", "CUDA out of memory."),
    raised(0, "RuntimeError", "CUDA error: an illegal memory access was encountered"),
    raised(0, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed."),
    killed(0, signal.SIGKILL, tail=("No space left on device",)),
    killed(0, signal.SIGABRT, tail=("pure virtual method called",)),
    raised(0, "EOFError"),
    raised(0, "RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
    raised(0, "ImportError", "libx.so: cannot open shared object file: Input/output error"),
    hung(bases=("Hang", "TimeoutError")),
    killed(0, signal.SIGSEGV),
    killed(0, signal.SIGKILL),
    exited(0, 137),
    lost(0, "gone"),
    end_of(0, EndKind.NOT_STARTED),
]


def told(end):
    return f"{end.error.type_name} {end.error.message}" if end.error else end.kind.value


@pytest.mark.parametrize("end", PERMANENT_ENDS, ids=told)
def test_what_another_attempt_can_t_mend_is_not_tried_again(end):
    assert verdict.prospect(end) is verdict.Prospect.NONE


@pytest.mark.parametrize("end", ONCE_MORE, ids=told)
def test_what_the_program_itself_did_is_doubtful_and_has_a_mark(end):
    assert verdict.prospect(end) is verdict.Prospect.DOUBTFUL
    assert verdict.mark(end) is not None


@pytest.mark.parametrize("end", UP_TO_THE_BUDGET, ids=told)
def test_what_its_surroundings_did_is_open_and_never_the_same_twice(end):
    assert verdict.prospect(end) is verdict.Prospect.OPEN
    assert verdict.mark(end) is None


def error(message, *, rank=0, type_name="ValueError", **more):
    return raised(rank, type_name, message, **more)


SAME = {
    "another rank and time": (error("bad"), error("bad", rank=2, elapsed_s=9000.0)),
    "an address": (error("at 0x7f12"), error("at 0x7eff")),
    "the rank's name": (error("rank 0, cuda:0"), error("rank 1, cuda:1", rank=1)),
    "a folder": (error("in /tmp/tmpab1/x"), error("in /tmp/tmpcd2/x")),
    "processes": tuple(
        error(f"pid(s) {pids} ended", type_name="RuntimeError") for pids in ("8, 9", "71")
    ),
    "a hang": (hung(), hung("rank 3 stood still for 62 s")),
    "an exit code": (exited(0, 3, tail=("no licence",)), exited(1, 3, tail=("no licence",))),
}


@pytest.mark.parametrize(("first", "again"), SAME.values(), ids=SAME)
def test_the_same_failure_is_known_again_where_only_the_start_differs(first, again):
    assert verdict.mark(first) == verdict.mark(again)


BAD = error("bad batch 3")
OTHERS = {
    "another line": (BAD, error("bad batch 3", where="train.py:8")),
    "a hang": (BAD, hung(where="train.py:8")),
    "another type": (BAD, error("bad batch 3", type_name="KeyError")),
    "another number": (BAD, error("bad batch 7")),
    "an exit code": (BAD, exited(0, 1)),
    "another exit code": (exited(0, 3), exited(0, 4)),
    "other last lines": (exited(0, 3, tail=("epoch 5",)), exited(0, 3, tail=("epoch 7",))),
}


@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS)
def test_another_failure_is_another_one(one, other):
    assert verdict.mark(one) != verdict.mark(other)


def test_a_lost_connection_has_a_mark_once_other_ranks_have_ended():
    first = raised(0, "RuntimeError", "Connection closed by peer [127.0.0.1]:26849", where="a.py:9")
    again = raised(0, "RuntimeError", "Connection closed by peer [127.0.0.1]:41637", where="a.py:9")
    assert verdict.mark(first) is None
    assert verdict.mark(first, after_early_end=True) == verdict.mark(again, after_early_end=True)
    assert verdict.mark(first, after_early_end=True) is not None


# A stop has a cause: who asked for it, and what the run's end says of it.


TERM = signal.SIGTERM


@pytest.mark.parametrize(
    ("signum", "facts", "cause"),
    [
        (signal.SIGINT, {}, verdict.StopCause.USER),
        (TERM, {"cancelled": True, "time_is_over": True}, verdict.StopCause.USER),
        (TERM, {"time_is_over": True, "node_is_lost": True}, verdict.StopCause.TIME),
        (TERM, {"node_is_lost": True}, verdict.StopCause.NODE_LOST),
        (TERM, {}, verdict.StopCause.OUTSIDE),
        (signal.SIGHUP, {}, verdict.StopCause.TERMINAL),
    ],
)
def test_who_asked_for_a_stop(signum, facts, cause):
    assert verdict.cause_of_stop(signum, **facts) is cause


def test_the_owner_s_word_beats_an_agent_s_that_came_before():
    assert (
        verdict.better_cause(verdict.StopCause.OUTSIDE, verdict.StopCause.TIME)
        is verdict.StopCause.TIME
    )
    assert (
        verdict.better_cause(verdict.StopCause.USER, verdict.StopCause.OUTSIDE)
        is verdict.StopCause.USER
    )


def end(signum, cause, *, saved=False, lost=None):
    return verdict.end_by_stop(cause, signum, "muster restart r", saved=saved, lost=lost or {})


def test_the_end_of_the_time_is_not_cancelled_by_anybody():
    state, code, report = end(TERM, verdict.StopCause.TIME)
    assert (state, code) == (RunState.TIMED_OUT, 143)
    assert report.error == "the time limit of the job was reached: the run was stopped with SIGTERM"


def test_what_was_saved_can_be_resumed():
    state, code, report = end(TERM, verdict.StopCause.TIME, saved=True)
    assert (state, code) == (RunState.PREEMPTED, 75)
    assert report.because == ("the end of the job's time asked to stop with SIGTERM",)


def test_a_job_that_is_ended_while_a_node_is_lost_names_the_node():
    state, code, report = end(TERM, verdict.StopCause.NODE_LOST, lost={"n2": "no answer for 15 s"})
    assert (state, code) == (RunState.PREEMPTED, 75)
    assert report.error == "n2 was lost, and the job was stopped with SIGTERM then"
    assert report.because == ("n2: no answer for 15 s",)


def test_who_cancelled_it_is_told_so():
    state, code, report = end(TERM, verdict.StopCause.USER)
    assert (state, code, report.because) == (RunState.CANCELLED, 143, ("you cancelled it",))


@pytest.mark.parametrize(
    ("signum", "code", "why"),
    [(signal.SIGINT, 130, "you cancelled it"), (signal.SIGHUP, 129, "the terminal was closed")],
)
def test_ctrl_c_and_a_closed_terminal_cancel_also_what_was_saved(signum, code, why):
    """A shell loop that runs what was preempted again must not take it for that."""
    state, exit_code, report = end(signum, verdict.cause_of_stop(signum), saved=True)
    assert (state, exit_code, report.because) == (RunState.CANCELLED, code, (why,))
    assert report.hint.startswith("muster restart r continues from the last save")
    assert ("--detach" in report.hint) == (signum == signal.SIGHUP)
