"""A line that is a JSON object is read as the message in it, with who and when."""

import json

import pytest

from torchmuster.diagnose.explain.events import Who
from torchmuster.diagnose.explain.reading.json_lines import lines_of
from torchmuster.diagnose.logs import read_logs
from unit.diagnose.explain.logs import traceback_of

MOMENT = 1773480413.0
WHEN = "2026-03-14T09:26:53Z"
TRACEBACK = traceback_of("ValueError: bad label 7")


def record_of(folder, *rows):
    path = folder / "job.log"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return read_logs([str(path)], year=2026)


def event_of(folder, *rows, kind="exception"):
    (event,) = [event for event in record_of(folder, *rows).events if event.kind == kind]
    return event


@pytest.mark.parametrize(
    ("row", "text", "who", "level"),
    [
        ({"log": "boom\n", "stream": "stderr", "time": WHEN}, "boom", Who(), ""),
        ({"event": "boom", "level": "error", "timestamp": WHEN, "rank": 3}, "boom", Who(rank=3), "error"),
        ({"message": "boom", "levelname": "WARNING", "asctime": "2026-03-14 09:26:53,000"}, "boom", Who(), "warning"),
        ({"msg": "boom", "level": "info", "ts": MOMENT, "hostname": "n1"}, "boom", Who(host="n1"), "info"),
        ({"msg": "boom", "level": 50, "time": MOMENT * 1000}, "boom", Who(), "error"),
        ({"message": "[rank5]: boom", "timestamp": WHEN}, "boom", Who(rank=5), ""),
        ({"log": "boom", "time": WHEN, "kubernetes": {"pod_name": "w-0", "host": "n1"}}, "boom", Who(host="w-0"), ""),
        ({"severity": "ERROR", "timestamp": WHEN, "jsonPayload": {"message": "boom"}}, "boom", Who(), "error"),
        ({"text": "boom\n", "record": {"level": {"name": "ERROR"}, "time": {"timestamp": 1.0, "repr": WHEN}}}, "boom", Who(), "error"),
        ({"log": json.dumps({"msg": "boom", "level": "warn", "rank": 2}) + "\n", "time": WHEN}, "boom", Who(rank=2), "warning"),
        ({"timestamp": int(MOMENT * 1e3), "message": "boom"}, "boom", Who(), ""),
    ],
)  # fmt: skip
def test_objects_of_loggers_and_collectors_are_their_messages(tmp_path, row, text, who, level):
    (line,) = record_of(tmp_path, row).logs[0].header
    assert (line.text, line.who, line.level) == (text, who, level)
    assert line.when == pytest.approx(MOMENT)


@pytest.mark.parametrize(
    "row",
    [
        {"message": "training failed", "exc_info": TRACEBACK, "level": "ERROR", "rank": 3},
        {"event": "training failed", "exception": TRACEBACK, "level": "error", "rank": 3},
        {"text": TRACEBACK, "rank": 3},
        {"log": json.dumps({"message": f"training failed\n{TRACEBACK}", "rank": 3}), "stream": "stderr"},
        {
            "event": "training failed",
            "rank": 3,
            "exception": [
                {
                    "exc_type": "ValueError",
                    "exc_value": "bad label 7",
                    "frames": [{"filename": "/home/u/train.py", "lineno": 9, "name": "<module>"}],
                }
            ],
        },
    ],
)  # fmt: skip
def test_traceback_within_a_message_is_read(tmp_path, row):
    event = event_of(tmp_path, {"message": "start"}, row, {"message": "end"})
    assert event.get("type") == "ValueError"
    assert event.get("where") == "/home/u/train.py:9"
    assert event.who.rank == 3
    assert event.line.number == 2


def test_traceback_of_which_docker_made_an_object_a_line_is_read(tmp_path):
    rows = [
        {"log": f"{line}\n", "stream": "stderr", "time": WHEN} for line in TRACEBACK.splitlines()
    ]
    assert event_of(tmp_path, *rows).line.number == 4


def test_object_behind_a_label_is_read(tmp_path):
    row = json.dumps({"message": TRACEBACK, "timestamp": WHEN})
    assert event_of(tmp_path, f"[pod/train-worker-0/pytorch] {row}").who.host == "train-worker-0"


@pytest.mark.parametrize(
    "line",
    ['{"loss": 0.5, "step": 3}', '{"message": "cut', "{'message': 'x'}", '{"message": 3}', "{}", '["a"]'],
)  # fmt: skip
def test_what_is_no_object_with_a_message_stays_as_it_is(tmp_path, line):
    assert record_of(tmp_path, line).logs[0].header[0].text == line


@pytest.mark.parametrize("when", ["Infinity", "-Infinity", "NaN", "1e400", "9" * 400])
def test_a_time_that_is_none_costs_only_the_time(tmp_path, when):
    (line,) = record_of(tmp_path, f'{{"message": "error: x", "time": {when}}}').logs[0].header
    assert line.text == "error: x"
    assert line.when is None


def test_deep_and_long_objects_do_no_harm(tmp_path):
    record_of(tmp_path, '{"message": ' + '{"a":' * 100_000 + "1", {"message": "error\n" * 100_000})
    assert len(lines_of(json.dumps({"message": "error\n" * 100_000}).encode())) <= 1000


def test_progress_of_each_rank_is_known(tmp_path):
    rows = [{"message": f"step {k}", "rank": k % 2, "level": "info"} for k in range(1000)]
    (log,) = record_of(tmp_path, *rows).logs
    steps = {who.rank: event.get("number") for who, event in log.last_progress.items()}
    assert steps == {0: "998", 1: "999"}
