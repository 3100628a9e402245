"""What a courier sends of a host's disk, and whose run directories it takes for its own."""

import os

import pytest

from torchmuster.files import code_copy
from torchmuster.files.layout import RunDir
from torchmuster.net import frames
from torchmuster.node.remote import files as courier_files
from torchmuster.node.remote.files import CodeOutputs, FrameStream, RecordStream


class Collected:
    """A writer that keeps what it is given."""

    is_broken = False

    def __init__(self):
        self.files = {}
        self.frames = []

    def send_bulk(self, frame):
        self.frames.append(frame)
        if frame[0] == frames.Kind.FILE:
            path, offset, data = frames.read_file(frame[5:])
            before = self.files.get(path, b"").ljust(offset, b"\0")
            self.files[path] = before[:offset] + data + before[offset + len(data) :]
        return True

    send = send_bulk


@pytest.fixture
def run_dir(tmp_path):
    run = RunDir(str(tmp_path / "run"))
    os.makedirs(run.attempt_logs(0))
    return run


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_only_what_was_appended_is_sent_again(run_dir):
    writer = Collected()
    stream = RecordStream(run_dir, writer)
    append(run_dir.events, "one\n")
    append(run_dir.rank_log(0, 1), "hello\n")
    stream.send_new()
    append(run_dir.events, "two\n")
    stream.send_new()
    log = "logs/main/train/attempt-0/rank-1.log"
    assert writer.files == {"events.jsonl": b"one\ntwo\n", log: b"hello\n"}
    assert len(writer.frames) == 3


def test_secret_and_plan_never_leave_the_host_and_the_result_does(run_dir):
    for name in ("secret", "plan.json", "head.json", "result.json", courier_files.TOKEN_FILE):
        append(os.path.join(run_dir.path, name), "x")
    append(run_dir.result + ".1.tmp", "half")
    writer = Collected()
    RecordStream(run_dir, writer).send_new(small_files=True)
    assert set(writer.files) == {"result.json"}


def test_run_directory_is_private_and_found_again_by_its_token(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    first = courier_files.make_own_run_dir("r1", "t" * 32)
    assert os.stat(first.path).st_mode & 0o777 == 0o700
    assert courier_files.make_own_run_dir("r1", "t" * 32) == first
    with pytest.raises(FileExistsError):
        courier_files.make_own_run_dir("r1", "u" * 32)


def test_same_file_system_is_seen_by_the_token_only(tmp_path):
    path = tmp_path / "token"
    assert not courier_files.sees(str(path), "t1")
    path.write_text("t1\n")
    assert courier_files.sees(str(path), "t1")
    assert not courier_files.sees(str(path), "t2")


def test_private_file_can_be_read_by_its_owner_only(tmp_path):
    courier_files.write_private(str(tmp_path / "secret"), "ab")
    assert os.stat(tmp_path / "secret").st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_pieces_read_like_a_file():
    pieces = iter([b"abc", b"de", b""])
    stream = FrameStream(lambda: next(pieces))
    assert [stream.read(2), stream.read(2), stream.read(2), stream.read(2)] == [
        b"ab",
        b"cd",
        b"e",
        b"",
    ]


def test_outputs_are_told_from_code_also_in_a_later_session(tmp_path):
    source, root = tmp_path / "source", tmp_path / "code"
    source.mkdir()
    (source / "train.py").write_text("1")
    with (tmp_path / "archive").open("w+b") as archive:
        code_copy.write_archive(str(source), ["train.py"], archive)
        archive.seek(0)
        code = CodeOutputs(str(root))
        assert not code.is_there
        code.unpack(FrameStream(lambda: archive.read(100)))
    (root / "out.txt").write_text("result")
    later = CodeOutputs(str(root))
    assert later.is_there
    writer = Collected()
    assert later.send(writer)["count"] == 1
    assert writer.frames[-1][5:] == b""
