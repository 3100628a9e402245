"""What is learnt of lines serves for all logs, and never fills the memory."""

from torchmuster.diagnose.explain.reading import scan as shapes
from torchmuster.diagnose.explain.reading.scan import MAX_MISSES, ShapeTable
from torchmuster.diagnose.logs import read_logs
from unit.diagnose.explain.logs import traceback_of


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
    monkeypatch.setattr(shapes, "_MAX_SHAPES", 10)
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
