"""Reading a run that lives, grows, is torn, is of another version, or is gone: shown or said, never an exception."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from kit.odd_records import ODD
from kit.records import event, start
from kit.values import run_plan, run_result
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.owner.create import write_owner
from torchmuster.core.owner.record import RecordTail, last_event
from torchmuster.launcher.model.run import RunRecord
from torchmuster.launcher.ui.run_lines import time_left_s
from torchmuster.launcher.views.find import view_run
from torchmuster.launcher.views.live import MOST_ATTEMPTS, LiveReader, TrainingTail, last_sample
from torchmuster.report import live_list
from torchmuster.report.cli.top import _print_once
from torchmuster.report.live_list import ListReader
from torchmuster.report.top import overview_lines, run_picture
from unit.launcher.model.samples import sample_of

STARTED = start(0, 0, nodes=[{"node": "n1", "host": "n1", "ranks": "0-3"}])
FAILED = event(60, "attempt_failed", attempt=0, what="SIGKILL in rank 1 on n1")
ELSEWHERE = {"pid": os.getpid(), "host": "elsewhere", "boot_id": "other"}


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    made = RunDir(str(tmp_path / "runs" / "20270115-080000-train-3f2a"))
    os.makedirs(made.path)
    name = os.path.basename(made.path)
    plan = run_plan(2, run_id=name, target="train.py", workers_per_node=(2,))
    write(made.plan, codec.to_plain(plan))
    return made


def write(path, *lines):
    texts = [line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines]
    with open(path, "a") as file:
        file.writelines(texts)


def sample_line(**changed):
    return codec.to_plain(sample_of(4, **changed))


def test_a_run_is_read_again_from_where_the_last_look_ended(run_dir):
    write_owner(run_dir)
    reader = LiveReader(run_dir)
    write(run_dir.events, STARTED)
    assert [one.ended_by for one in reader.read().attempts] == [""]
    write(run_dir.events, json.dumps(FAILED)[:20])
    assert [one.ended_by for one in reader.read().attempts] == [""], "half a line is none"
    write(run_dir.events, json.dumps(FAILED)[20:] + "\n")
    (attempt,) = reader.read().attempts
    assert (attempt.ended_by, attempt.ended_at - attempt.began_at) == (FAILED["what"], 60.0)


def test_the_training_is_read_as_it_grows(run_dir):
    reader = LiveReader(run_dir)
    write(
        run_dir.training,
        event(10, "planned", step=0, total_steps=500),
        event(10, "metrics", step=50, values={"accuracy": 0.2, "loss": 0.5}),
        event(10, "save", step=100),
    )
    training = reader.read().training
    assert (training.step, training.total_steps, training.curve_of) == (100, 500, "loss")
    assert training.curve == (0.5,)
    write(run_dir.training, event(10, "saved", step=101, saved=100, folder=""))
    training = reader.read().training
    assert (training.saved_step, training.saving_since) == (100, None)


def test_a_snapshot_that_is_being_written_grows(run_dir, tmp_path):
    reader, folder = TrainingTail(run_dir), tmp_path / "snapshots"
    (folder / ".step-000000100.3.tmp").mkdir(parents=True)
    (folder / ".step-000000050.2.tmp").mkdir()
    (folder / ".step-000000050.2.tmp" / "data").write_bytes(bytes(7))
    resumed = event(10, "resumed", step=0, folder=str(folder))
    write(run_dir.training, resumed, event(10, "save", step=100))
    training = reader.read(is_over=False)
    assert (training.saving_step, training.saving_bytes) == (100, 0)
    (folder / ".step-000000100.3.tmp" / "rank-0").write_bytes(bytes(3000))
    (folder / ".step-000000100.3.tmp" / "rank-1").write_bytes(bytes(40))
    assert reader.read(is_over=False).saving_bytes == 3040
    write(run_dir.training, event(10, "saved", step=101, saved=100))
    assert reader.read(is_over=False).saving_step is None


def test_a_loop_that_waits_for_its_saves_is_not_saving_behind_them(run_dir):
    saved = event(10, "saved", step=100, saved=100, folder="")
    write(run_dir.training, saved, event(10, "save", step=100))
    training = TrainingTail(run_dir).read(is_over=False)
    assert (training.saved_step, training.saving_since) == (100, None)


def test_steps_that_are_done_again_are_one_curve(run_dir):
    metrics = [event(1, "metrics", step=step, values={"loss": 1 / step}) for step in (50, 100, 150)]
    write(run_dir.training, *metrics, {"event": "resumed", "step": 100}, metrics[2])
    assert len(LiveReader(run_dir).read().training.curve) == 3


def test_a_long_training_keeps_a_curve_of_bounded_length(run_dir):
    metrics = ({"event": "metrics", "step": n, "values": {"loss": 1.0}} for n in range(1, 9001))
    write(run_dir.training, *metrics)
    assert 1000 <= len(LiveReader(run_dir).read().training.curve) <= 2001


def test_the_head_is_asked_first_and_the_record_stands_in(run_dir):
    write(run_dir.events, STARTED)
    write(run_dir.samples, sample_line())
    write(run_dir.owner, ELSEWHERE)
    fresh = sample_of(4, slow=1)
    assert LiveReader(run_dir, lambda: (fresh, "")).read().sample == fresh
    without = LiveReader(run_dir, lambda: (None, "it is behind a firewall")).read()
    assert (without.sample, without.unheard) == (sample_of(4), "it is behind a firewall")


@pytest.mark.parametrize("num_ranks", [1, 4, 4096])
def test_the_last_whole_sample_is_found_in_a_long_record(run_dir, num_ranks):
    lines = [codec.to_plain(sample_of(num_ranks, over_s=float(n))) for n in range(3)]
    write(run_dir.samples, *lines, json.dumps(lines[0])[:1000])
    assert last_sample(run_dir).over_s == 2.0


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_what_another_version_or_a_crash_has_written_is_no_exception(run_dir, text):
    for path in (run_dir.events, run_dir.training, run_dir.samples, run_dir.result, run_dir.owner):
        write(path, text)
    write(run_dir.events, STARTED)
    live = LiveReader(run_dir).read()
    assert [one.number for one in live.attempts][:1] == [0]
    assert len(run_picture(live, 80)) > 1
    (row,) = ListReader().read()
    assert row.run_id == live.run_id
    overview_lines([row], 80)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_one_bad_record_takes_no_run_from_the_list(run_dir, text, as_json, capsys):
    bad = RunDir(f"{run_dir.path}-bad")
    shutil.copytree(run_dir.path, bad.path)
    for path in (bad.events, bad.training, bad.samples, bad.result, bad.owner):
        write(path, text)
    for view in (None, view_run(bad)):
        assert _print_once(view, as_json=as_json) == 0
    out = capsys.readouterr().out
    assert "train-3f2a" in out
    assert "train-3f2a-bad" in out


def test_a_record_that_cannot_be_read_is_a_row_that_says_so(run_dir, monkeypatch, capsys):
    def fail(view, now):
        raise OverflowError("cannot convert float infinity to integer")

    bad = RunDir(f"{run_dir.path}-bad")
    shutil.copytree(run_dir.path, bad.path)
    monkeypatch.setattr(live_list, "account_of", fail)
    rows = ListReader().read()
    assert len(rows) == 2
    assert all(row.why.startswith("this record can't be read: OverflowError") for row in rows)


def test_an_ended_run_is_read_once_until_its_files_change(run_dir, monkeypatch):
    looks = []

    def look(where, record):
        return looks.append(where.path) or view_run(where, record)

    monkeypatch.setattr(live_list, "view_run", look)
    write(run_dir.events, STARTED)
    reader = ListReader()
    assert [row.state for row in reader.read()] == ["lost"], "it has no owner"
    assert [row.state for row in reader.read()] == ["lost"]
    assert looks == [run_dir.path]
    write(run_dir.events, FAILED)
    reader.read()
    assert looks == [run_dir.path] * 2


def test_a_run_that_goes_on_is_read_from_where_the_last_look_ended(run_dir, monkeypatch):
    write(run_dir.owner, ELSEWHERE)
    write(run_dir.events, STARTED)
    reader = ListReader()
    assert [row.state for row in reader.read()] == ["running"]
    reads = []
    look = lambda where, record: reads.append(record) or view_run(where, record)  # noqa: E731
    monkeypatch.setattr(live_list, "view_run", look)
    write(run_dir.events, FAILED)
    taken = []
    monkeypatch.setattr(RunRecord, "take", lambda record, line: taken.append(line["event"]))
    assert [row.state for row in reader.read()] == ["running"]
    assert taken == ["attempt_failed"], "what was folded is not read again"
    assert [one.number for one in reads[0].attempts] == [0]


def test_the_list_and_the_page_tell_the_same_time_that_is_left(run_dir):
    write(run_dir.owner, ELSEWHERE)
    write(run_dir.events, STARTED)
    write(run_dir.training, {"event": "planned", "step": 0, "total_steps": 450})
    now, rates = datetime.now(UTC), (10.0, 20.0, 20.0, 20.0)
    write(run_dir.samples, sample_line(time=now.isoformat(), steps_per_s=rates))
    (row,) = ListReader().read()
    assert row.left_s == time_left_s(LiveReader(run_dir).read()) == 5.0
    old = (now - timedelta(seconds=60)).isoformat()
    write(run_dir.samples, sample_line(time=old, steps_per_s=rates))
    (row,) = ListReader().read()
    assert row.left_s is None, "nobody knows it from old numbers"
    assert time_left_s(LiveReader(run_dir).read()) is None


def test_the_last_event_is_found_without_reading_the_record(run_dir):
    write(run_dir.events, STARTED, {"event": "network", "pairs": "x" * 200_000}, FAILED, "{torn")
    assert last_event(run_dir.events) == FAILED
    write(run_dir.events, "\n", {"event": "network", "pairs": "x" * 200_000})
    assert last_event(run_dir.events)["event"] == "network"
    assert last_event(run_dir.training) is None


def test_the_last_attempt_ends_with_its_run_where_the_record_is_cut(run_dir):
    write(run_dir.events, STARTED, "{torn")
    result = run_result(elapsed_s=3.0)
    write(run_dir.result, codec.to_plain(result))

    (attempt,) = LiveReader(run_dir).read().attempts

    assert attempt.began_at is not None
    assert (attempt.ended_at, attempt.ended_by) == (attempt.began_at + 3.0, "succeeded")


def test_the_plan_of_another_version_is_said_to_be_so(run_dir):
    write(run_dir.plan, "{")
    (problem,) = LiveReader(run_dir).read().problems
    assert "another version" in problem


def test_a_run_that_is_gone_is_said_to_be_so(run_dir):
    reader = LiveReader(run_dir)
    write(run_dir.events, STARTED)
    reader.read()
    shutil.rmtree(run_dir.path)
    assert "has been removed" in reader.read().problems[0]


def test_ten_thousand_attempts_are_read_and_the_last_are_kept(run_dir):
    started = [{**STARTED, "attempt": n} for n in range(10_000)]
    failed = [{**FAILED, "attempt": n} for n in range(10_000)]
    write(run_dir.events, *(event for pair in zip(started, failed, strict=True) for event in pair))
    live = LiveReader(run_dir).read()
    assert (live.num_attempts, len(live.attempts)) == (10_000, MOST_ATTEMPTS)


def test_a_record_that_begins_anew_is_read_anew(run_dir):
    tail = RecordTail(run_dir.events)
    write(run_dir.events, STARTED, FAILED)
    assert len(list(tail.read()[0])) == 2
    os.truncate(run_dir.events, 0)
    write(run_dir.events, STARTED)
    events, has_restarted = tail.read()
    assert (list(events), has_restarted) == ([STARTED], True)


def test_a_record_is_read_a_block_at_a_time_and_a_torn_line_waits(run_dir, monkeypatch):
    monkeypatch.setattr("torchmuster.core.owner.record._BLOCK_BYTES", 64)
    events = [{"event": "notice", "text": "x" * size} for size in (1, 500, 0, 63, 64, 65)]
    lines = "".join(json.dumps(event) + "\n" for event in events).encode()
    for cut in range(0, len(lines), 7):
        with open(run_dir.events, "wb") as record:
            record.write(lines[:cut])
        tail = RecordTail(run_dir.events)
        first = list(tail.read()[0])
        assert tail.position == lines[:cut].rfind(b"\n") + 1
        with open(run_dir.events, "ab") as record:
            record.write(lines[cut:])
        assert first + list(tail.read()[0]) == events
