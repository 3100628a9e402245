"""What is sent of a sweep's record: everything once, and of members that have ended nothing again."""

import os
from pathlib import Path

import pytest

from torchmuster.files.layout import RunDir
from torchmuster.node.pod.sweep_record import SweepStream


class Sink:
    """The other side: the files as they come, and how many pieces there were."""

    def __init__(self):
        self.files, self.paths = {}, []

    def send(self, piece, *, bulk=False):
        content = self.files.get(piece.path, b"") if piece.offset else b""
        self.files[piece.path] = content[: piece.offset] + piece.data
        self.paths.append(piece.path)
        return True


@pytest.fixture
def run_dir(tmp_path):
    found = RunDir(str(tmp_path / "s"))
    os.makedirs(os.path.join(found.members, "s.0", "logs"))
    Path(found.events).write_text("sweep\n")
    return found


def member_of(run_dir, number=0):
    return RunDir(os.path.join(run_dir.members, f"s.{number}"))


def test_a_record_grows_on_the_other_side_as_it_grows_here(run_dir):
    sink = Sink()
    stream = SweepStream(run_dir, sink)
    log = Path(member_of(run_dir).path, "logs", "rank-0.log")
    log.write_text("one\n")
    stream.send_new()
    log.write_text("one\ntwo\n")
    stream.send_new()
    assert sink.files["members/s.0/logs/rank-0.log"] == b"one\ntwo\n"
    assert sink.files["events.jsonl"] == b"sweep\n"


def test_what_a_member_has_made_comes_with_its_result_and_is_then_left_alone(run_dir):
    sink = Sink()
    stream, member = SweepStream(run_dir, sink), member_of(run_dir)
    os.makedirs(os.path.join(member.path, "output"))
    Path(member.path, "output", "model.bin").write_text("weights")
    Path(member.path, "secret").write_text("key")
    stream.send_new()
    assert "members/s.0/output/model.bin" not in sink.files
    Path(member.result).write_text("{}")
    stream.send_new()  # its last events may be written after its result
    Path(member.events).write_text("last\n")
    stream.send_new()
    assert sink.files["members/s.0/events.jsonl"] == b"last\n"
    assert sink.files["members/s.0/output/model.bin"] == b"weights"
    assert sink.files["members/s.0/result.json"] == b"{}"
    assert not any("secret" in path for path in sink.paths)
    count = len(sink.paths)
    stream.send_new()
    assert len(sink.paths) == count


def test_a_member_that_the_other_side_has_whole_is_not_sent_again(run_dir):
    sink, member = Sink(), member_of(run_dir)
    Path(member.events).write_text("all\n")
    Path(member.result).write_text("{}")
    SweepStream(run_dir, sink, {"members/s.0/result.json": 2}).send_new(small_files=True)
    assert not any(path.startswith("members/") for path in sink.paths)


def test_a_member_that_runs_again_is_sent_again(run_dir):
    sink, member = Sink(), member_of(run_dir)
    Path(member.result).write_text("{}")
    stream = SweepStream(run_dir, sink)
    for _ in range(2):
        stream.send_new()
    os.unlink(member.result)
    Path(member.events).write_text("again\n")
    stream.send_new()
    assert sink.files["members/s.0/events.jsonl"] == b"again\n"
