"""Values are read from files that the record names, and nothing else is unpickled; errors from the command's text."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.records import event, lines
from torchmuster.core.model import codec
from torchmuster.core.model.failure import ValueNote
from torchmuster.core.model.text import render_report, report_of_error
from torchmuster.errors import MusterError, NotFoundError
from torchmuster.launcher.api.failures import RunFailed, read_errors
from torchmuster.launcher.api.run import ResultError, have_arrived, noted_values, read_value
from torchmuster.launcher.model.carried import own_python


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def value_note(data, **more):
    told = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return ValueNote(**{**told, "python": own_python(), **more})


def began(attempt, world_size):
    return event(0, "attempt_started", attempt=attempt, world_size=world_size)


def ended(attempt, rank, data=None):
    value = {} if data is None else {"value": codec.to_plain(value_note(data))}
    return event(0, "worker_ended", attempt=attempt, rank=rank, **value)


def test_only_the_last_attempt_counts(run_dir):
    events = [began(0, 2), ended(0, 0, b"old"), ended(0, 1, b"old")]
    events += [began(1, 2), ended(1, 1, b"b"), ended(0, 0, b"late"), ended(1, 0, b"a")]
    lines(run_dir.events, events)

    assert noted_values(run_dir) == (1, {0: value_note(b"a"), 1: value_note(b"b")})


def test_ranks_without_a_value_are_named(run_dir):
    lines(run_dir.events, [began(0, 3), ended(0, 1, b"x"), ended(0, 0)])

    with pytest.raises(NotFoundError, match="ranks 0"):
        noted_values(run_dir)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps(event(0, "worker_ended")),
        json.dumps(event(0, "worker_ended", attempt=0, rank=0, value=3)),
    ],
)
def test_a_damaged_record_is_left_out(run_dir, line):
    all_lines = [json.dumps(began(0, 1)), line, json.dumps(ended(0, 0, b"x"))]
    Path(run_dir.events).write_text("\n".join(all_lines) + "\n")

    assert noted_values(run_dir)[1] == {0: value_note(b"x")}


def test_a_value_is_read_back(tmp_path):
    data = pickle.dumps({"loss": 0.5})
    (tmp_path / "v").write_bytes(data)

    assert read_value(str(tmp_path / "v"), value_note(data), 0) == {"loss": 0.5}


@given(st.data())
def test_no_flipped_bit_and_no_cut_is_unpickled(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("value")
    good = pickle.dumps(Trap(str(folder / "mark")))
    place = data.draw(st.integers(0, 9999)) % len(good)
    bit = data.draw(st.integers(0, 7))
    flipped = good[:place] + bytes([good[place] ^ (1 << bit)]) + good[place + 1 :]
    turned = good[place:] + good[:place] if place else b""
    bad = data.draw(st.sampled_from([flipped, good[:place], good + b"x", turned]))
    path = folder / "v"
    path.write_bytes(bad)

    with pytest.raises(ResultError, match="not what the rank has sent"):
        read_value(str(path), value_note(good), 3)
    assert not (folder / "mark").exists()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "absent"])
def test_what_is_no_file_of_this_user_is_not_read(tmp_path, kind):
    data = pickle.dumps(Trap(str(tmp_path / "mark")))
    (tmp_path / "real").write_bytes(data)
    path = tmp_path / "v"
    if kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)

    with pytest.raises(ResultError, match="can't be read"):
        read_value(str(path), value_note(data), 0)
    assert not (tmp_path / "mark").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_is_not_read(tmp_path):
    data = pickle.dumps(Trap(str(tmp_path / "mark")))
    (tmp_path / "v").write_bytes(data)
    os.chown(tmp_path / "v", 65534, 65534)

    with pytest.raises(ResultError, match="can't be read") as told:
        read_value(str(tmp_path / "v"), value_note(data), 0)
    assert "another user's" in told.value.why
    assert not (tmp_path / "mark").exists()


def test_another_python_is_refused_before_the_file_is_read(tmp_path):
    with pytest.raises(ResultError, match=r"pickled by Python 3\.2"):
        read_value(str(tmp_path / "absent"), value_note(b"", python="3.2"), 0)


def test_files_of_other_hosts_may_come_later(run_dir):
    notes = {0: value_note(b"x"), 1: value_note(b"yy")}

    assert not have_arrived(run_dir, 0, notes)
    os.makedirs(run_dir.attempt_logs(0))
    for rank, text in ((0, b"x"), (1, b"y")):
        Path(run_dir.rank_value(0, rank)).write_bytes(text)
    assert not have_arrived(run_dir, 0, notes)
    Path(run_dir.rank_value(0, 1)).write_bytes(b"yy")
    assert have_arrived(run_dir, 0, notes)


WORDS = st.text("abc :`/.-", min_size=1, max_size=30).map(str.strip).filter(bool)
LINES = st.lists(WORDS, min_size=1, max_size=3).map("\n".join)


@given(
    st.lists(st.tuples(WORDS, st.none() | WORDS, st.none() | LINES, st.none() | WORDS), max_size=3)
)
def test_what_is_printed_is_read_back(parts):
    errors = [MusterError(what, where=at, why=why, fix=fix) for what, at, why, fix in parts]
    text = "muster: a note\n" + "\n".join(render_report(report_of_error(e)) for e in errors)

    assert [e.parts() for e in read_errors(text)] == [e.parts() for e in errors]


def test_text_without_an_error_has_none():
    assert read_errors("Traceback (most recent call last):\n    error: x\n") == []


def test_a_run_without_a_result_is_lost():
    failed = RunFailed("train-12ab", None, "lost")

    assert str(failed) == "the run train-12ab ended as lost\nhint: muster status train-12ab"
    assert (failed.rank, failed.traceback, failed.exit_code) == (None, "", 1)
