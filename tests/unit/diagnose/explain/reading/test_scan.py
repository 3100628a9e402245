"""From logs to events: who wrote what, and how far each got."""

import pytest

from torchmuster.diagnose.explain.events import Who
from torchmuster.diagnose.explain.reading.scan import MAX_EVENTS_OF_A_SHAPE, who_of_path
from torchmuster.diagnose.logs import read_logs
from unit.diagnose.explain.logs import events_of, traceback_of


@pytest.mark.parametrize(
    ("path", "who"),
    [
        ("logs/rank-3.log", Who(rank=3)),
        ("n1.log", Who(host="n1")),
        ("logs/gpu-a3.out", Who(host="gpu-a3")),
        ("slurm-node07.cluster.org.err", Who(host="node07.cluster.org")),
        ("none_x/attempt_0/3/stderr.log", Who(task=3)),
        ("slurm-4711.out", Who()),
        ("train.log", Who()),
    ],
)
def test_name_of_a_log_says_who_wrote_it(path, who):
    assert who_of_path(path) == who


def test_same_line_many_times_is_kept_so_often_and_no_more(tmp_path):
    events = events_of(tmp_path, "Connection reset by peer\n" * 5000)
    assert len(events) <= MAX_EVENTS_OF_A_SHAPE + 1


def test_failure_behind_a_million_lines_is_found_at_its_line(tmp_path):
    text = "".join(f"step {k} loss 0.{k % 97}\n" for k in range(50_000)) + traceback_of(
        "ValueError: x"
    )
    (event,) = [e for e in events_of(tmp_path, text) if e.kind == "exception"]
    assert event.line.number == 50_004


def test_last_step_of_each_rank_is_known(tmp_path):
    path = tmp_path / "job.log"
    path.write_text("".join(f"[rank{k % 2}]: step {k}\n" for k in range(1000)))
    (log,) = read_logs([str(path)], year=2026).logs
    assert {who.rank: event.get("number") for who, event in log.last_progress.items()} == {
        0: "998",
        1: "999",
    }


def test_traceback_that_is_cut_by_the_end_of_the_log_is_no_cause(tmp_path):
    events = events_of(tmp_path, traceback_of("ValueError: x").rpartition("ValueError")[0])
    assert all(event.get("type") == "" for event in events)


def test_two_tracebacks_of_one_rank_are_two_events(tmp_path):
    events = events_of(tmp_path, traceback_of("ValueError: x") + traceback_of("KeyError: y"))
    assert [event.get("type") for event in events] == ["ValueError", "KeyError"]
