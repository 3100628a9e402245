"""From logs to events: who wrote what, and how far each got."""

import pytest

from torchmuster.diagnose.explain.events import Who
from torchmuster.diagnose.explain.reading import scan
from torchmuster.diagnose.explain.reading.scan import (
    MAX_EVENTS_OF_A_SHAPE,
    MAX_MISSES,
    ShapeTable,
    undrawn,
    who_of_path,
)
from torchmuster.diagnose.logs import read_logs
from unit.diagnose.explain.logs import events_of, explain, traceback_of


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
    steps = "".join(f"step {k} loss 0.{k % 97}\n" for k in range(50_000))
    events = events_of(tmp_path, steps + traceback_of("ValueError: x"))
    (event,) = [event for event in events if event.kind == "exception"]
    assert event.line.number == 50_004


def test_last_step_of_each_rank_is_known(tmp_path):
    path = tmp_path / "job.log"
    path.write_text("".join(f"[rank{k % 2}]: step {k}\n" for k in range(1000)))
    (log,) = read_logs([str(path)], year=2026).logs
    steps = {who.rank: event.get("number") for who, event in log.last_progress.items()}
    assert steps == {0: "998", 1: "999"}


def test_traceback_that_is_cut_by_the_end_of_the_log_is_no_cause(tmp_path):
    events = events_of(tmp_path, traceback_of("ValueError: x").rpartition("ValueError")[0])
    assert all(event.get("type") == "" for event in events)


def test_two_tracebacks_of_one_rank_are_two_events(tmp_path):
    events = events_of(tmp_path, traceback_of("ValueError: x") + traceback_of("KeyError: y"))
    assert [event.get("type") for event in events] == ["ValueError", "KeyError"]


# What is learnt of lines serves for all logs, and never fills the memory.


def test_shape_that_always_missed_means_nothing_also_in_another_log():
    table = ShapeTable()
    state = table.learn(b"error in quotes", is_meaningful=True)
    for _ in range(MAX_MISSES // 2):
        state.miss()
    table.end_log()
    for _ in range(MAX_MISSES // 2):
        state.miss()
    assert not state.is_meaningful


def test_shape_that_was_once_an_event_keeps_its_meaning():
    table = ShapeTable()
    state = table.learn(b"error", is_meaningful=True)
    table.take(state)
    table.end_log()
    for _ in range(2 * MAX_MISSES):
        state.miss()
    assert state.is_meaningful
    assert state.num_taken == 0  # of the log that is read now


def test_full_table_forgets_what_this_log_does_not_need(monkeypatch):
    monkeypatch.setattr(scan, "_MAX_SHAPES", 10)
    table = ShapeTable()
    needed = table.learn(b"step 0", is_meaningful=True)
    table.keep_progress(needed, 1, 1, b"step 1")
    for number in range(100):
        table.learn(b"x" * number, is_meaningful=False)
    assert len(table.known) <= 10
    assert table.known[b"step 0"] is needed


def test_shape_of_a_very_long_line_is_not_kept():
    table = ShapeTable()
    table.learn(b"x" * 100_000, is_meaningful=False)
    assert not table.known


def test_lines_of_progress_are_bounded_in_number_and_length():
    table = ShapeTable()
    for number in range(3000):
        state = table.learn(b"step %d" % number, is_meaningful=True)
        for line in range(100):
            table.keep_progress(state, line, line, b"x" * 5000)
    kept = list(table.progress())
    assert len(kept) <= 2048
    assert sum(map(len, kept)) < 200_000
    assert max(len(raw) for lines in kept for *_, raw in lines) <= 1000


def test_progress_of_one_log_is_not_that_of_the_next(tmp_path):
    for name, last in (("rank-0.log", 700), ("rank-1.log", 500)):
        (tmp_path / name).write_text("".join(f"step {k}\n" for k in range(1, last)))
    logs = read_logs([str(tmp_path)], year=2026).logs
    steps = [event.get("number") for log in logs for event in log.last_progress.values()]
    assert steps == ["699", "499"]


def test_error_is_found_in_every_log_whatever_came_before(tmp_path):
    for rank in range(5):
        text = "step 1\n" * 300 + traceback_of(f"ValueError: bad label {rank}")
        (tmp_path / f"rank-{rank}.log").write_text(text)
    events = read_logs([str(tmp_path)], year=2026).events
    assert [event.who.rank for event in events if event.kind == "exception"] == [0, 1, 2, 3, 4]


# Tracebacks and rows as rich draws them.


BOX = """\
epoch 0
╭─────────────── Traceback (most recent call last) ────────────────╮
│ /home/u/fit.py:6 in <module>                                     │
│                                                                  │
│   5 │   print("epoch 0")                                         │
│ ❱ 6 main()                                                       │
│                                                                  │
│ /home/u/fit.py:3 in load                                         │
│                                                                  │
│ ❱ 3 def load(path): return open(path)                            │
│ ╭────────── locals ──────────╮                                   │
│ │ path = '/lustre/projects/' │                                   │
│ ╰────────────────────────────╯                                   │
╰──────────────────────────────────────────────────────────────────╯
FileNotFoundError: [Errno 2] No such file or directory:
'/lustre/projects/speech/features/mel80/train-clean-460/shard-00017.
tar'
"""
ROWS = """\
[11/23/26 04:00:13] INFO     starting with 8 workers                    save.py:6
                    ERROR    Could not write the checkpoint to          save.py:7
                             /lustre/projects/multilingual/checkpoints/
                             run-17/step-009000: [Errno 28] No space
                             left on device:
                             '/lustre/projects/multilingual/checkpoints
                             /run-17/step-009000/optimizer.pt'
"""


def test_a_traceback_in_a_box_is_read_with_its_frames_and_its_wrapped_message(tmp_path):
    first = explain(tmp_path, job=BOX).first
    assert first.cause == "file-missing"
    assert first.at == "/home/u/fit.py:3"
    assert first.error.endswith("/train-clean-460/shard-00017.tar")


def test_rows_of_a_logger_are_one_message(tmp_path):
    first = explain(tmp_path, job=ROWS).first
    assert first.cause == "disk-full"
    assert "/checkpoints/run-17/step-009000/optimizer.pt" in first.error


def test_what_is_no_box_stays_as_it_is():
    assert undrawn("epoch 1 ─ loss 2.0") == "epoch 1 ─ loss 2.0"
    assert undrawn("  12%|█████     | 3/25 │ left") == "  12%|█████     | 3/25 │ left"
