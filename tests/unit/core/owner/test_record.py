"""What a run has written, read while it is still being written."""

import json

from kit.records import start
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.text import as_bytes
from torchmuster.core.owner import record as reading


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n[1]\n{"event": "b"}\n{"event": "c')

    assert [event["event"] for event in reading.read_lines(str(path))] == ["a", "b"]


def test_a_run_without_records_has_none(tmp_path):
    run_dir = RunDir(str(tmp_path))

    assert list(reading.read_lines(str(tmp_path / "none"))) == []
    assert reading.read_plan(run_dir) is None
    assert reading.read_result(run_dir) is None


def test_a_result_of_another_shape_is_none(tmp_path):
    run_dir = RunDir(str(tmp_path))
    (tmp_path / "result.json").write_text('{"state": 7}')

    assert reading.read_result(run_dir) is None


def new_of(follow, path):
    return "".join(text for _, text in follow.texts([(0, str(path))]))


def test_a_growing_log_is_read_on_from_where_the_last_look_ended(tmp_path):
    path, follow = tmp_path / "log", reading.Follow()
    path.write_bytes(b"one\n")
    assert new_of(follow, path) == "one\n"

    with path.open("ab") as log:
        log.write(b"two \xff\n")
    assert new_of(follow, path) == "two \udcff\n"
    assert new_of(follow, path) == ""
    assert new_of(follow, tmp_path / "none") == ""


def test_a_log_that_begins_anew_is_read_anew(tmp_path):
    path, follow = tmp_path / "log", reading.Follow()
    path.write_text("a first line\n")
    new_of(follow, path)
    path.write_text("anew\n")
    assert new_of(follow, path) == "anew\n"
    with path.open("a") as log:
        log.write("and on\n")
    assert new_of(follow, path) == "and on\n"


def test_events_and_logs_of_a_record_come_once_and_anew_with_it(tmp_path):
    record, log = tmp_path / "events.jsonl", tmp_path / "log"
    follow = reading.Follow(str(record))
    assert list(follow.events()) == []
    started = '{"time": "2027-01-15T08:00:00.000Z", "event": "run_started", "run_id": "r"}\n'
    record.write_text(started * 2), log.write_text("text\n")
    assert [one.event.run_id for one in follow.events()] == ["r", "r"]
    assert new_of(follow, log) == "text\n"
    assert [list(follow.events()), new_of(follow, log)] == [[], ""]
    record.write_text(started)
    assert len(list(follow.events())) == 1
    assert new_of(follow, log) == "text\n"


def test_a_character_of_which_a_log_has_half_is_read_when_it_is_whole(tmp_path):
    path, follow = tmp_path / "rank-0.log", reading.Follow()
    path.write_bytes(b"caf\xc3")
    assert new_of(follow, path) == "caf"
    assert new_of(follow, path) == ""
    path.write_bytes(b"caf\xc3\xa9 \xff\n")
    assert as_bytes(new_of(follow, path)) == b"\xc3\xa9 \xff\n"


def test_the_next_attempt_is_behind_all_that_any_record_knows(tmp_path):
    run_dir = RunDir(str(tmp_path))
    assert reading.next_attempt(run_dir) == 0
    events = [start(number, number) for number in (0, 1)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert reading.next_attempt(run_dir) == 2
    for name in ("attempt-2", "attempt-x", "other"):
        (tmp_path / "logs" / "main" / "train" / name).mkdir(parents=True)
    assert reading.next_attempt(run_dir) == 3, "the head's last event was lost with it"
