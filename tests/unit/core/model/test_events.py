"""Events as values: what is written is read back, and a record of another version as far as it can be."""

import dataclasses
import json
import typing

import pytest

from kit.records import end_of_rank, event, result
from torchmuster.core.model import codec, events
from torchmuster.core.model.events import RecordEvent, event_of, fields_of, line_of, parse
from torchmuster.core.model.failure import WorkerEnd

KINDS = sorted(name for name in RecordEvent.kinds if name != "member")


def sample(annotation):
    """Return a value of a type that says something."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if type(None) in arguments:
        return sample(next(one for one in arguments if one is not type(None)))
    if origin is tuple:
        some = arguments[:1] if arguments[-1] is Ellipsis else arguments
        return tuple(map(sample, some))
    if origin is dict:
        return {"cause": "c"}
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return annotation(
            **{one.name: sample(hints[one.name]) for one in dataclasses.fields(annotation)}
        )
    if isinstance(annotation, type) and hasattr(annotation, "__members__"):
        return next(iter(annotation))
    return {str: "word", int: 3, float: 2.5, bool: True}[annotation]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read_back(name):
    cls = RecordEvent.kinds[name]
    hints = typing.get_type_hints(cls)
    made = cls(**{one.name: sample(hints[one.name]) for one in dataclasses.fields(cls)})
    line = json.loads(line_of(made))

    assert line["event"] == name
    read = parse(line)
    assert read.event == made
    assert (read.time, read.event.name) == (line["time"], name)


def test_fields_that_say_nothing_are_not_written():
    assert fields_of(events.NoticeEvent(text="t")) == {"text": "t"}
    assert fields_of(events.WorkerEndedEvent(attempt=0, rank=0)) == {
        "attempt": 0,
        "rank": 0,
        "asked": False,
        "elapsed_s": 0.0,
    }


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"time": "2027-01-15T08:00:00Z"},
        {"time": "2027-01-15T08:00:00Z", "event": "of_another_version"},
        {"time": "2027-01-15T08:00:00Z", "event": "attempt_started"},
        {"time": "2027-01-15T08:00:00Z", "event": "attempt_started", "attempt": float("inf")},
        {"time": "yesterday", "event": "attempt_started", "attempt": 0},
        {"time": 7, "event": "notice", "text": "t"},
        {"time": "2027-01-15T08:00:00Z", "event": ["notice"]},
        {"time": "2027-01-15T08:00:00Z", "event": "time_limit", "ends_at": int("9" * 400)},
    ],
)
def test_what_lacks_what_it_needs_is_left_out(line):
    assert parse(line) is None


def test_fields_of_another_version_are_left_out_and_the_others_count():
    start = event_of(
        "attempt_started", {"attempt": 4, "world_size": "many", "why": "start", "colour": "red"}
    )
    assert start == events.AttemptStartedEvent(attempt=4, why="start")
    failed = event_of("attempt_failed", {"attempt": 0, "what": "w", "cause": {"rank": 3}})
    assert failed == events.AttemptFailedEvent(attempt=0, what="w")


def test_a_whole_result_is_the_event_on_the_end():
    line = event(3, "run_ended", **result())
    ended = parse(line).event
    assert isinstance(ended, events.RunEndedEvent)
    assert fields_of(ended) == result()
    assert parse({**line, "of_another_version": 1}).event == ended
    assert parse({**line, "state": "of another version"}).event == events.RunEndedEvent()


def test_a_cause_is_the_end_of_a_worker():
    failed = event_of("attempt_failed", {"attempt": 0, "cause": end_of_rank(3)})
    assert failed.cause == codec.from_plain(WorkerEnd, end_of_rank(3))
