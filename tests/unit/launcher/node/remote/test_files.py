"""What a remote end sends of its host's disk, and which run directories it takes for its own."""

import os

import pytest

from torchmuster.core.files.layout import RunDir
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.net.remote_messages import CODE_FILE, OUTPUT_FILE
from torchmuster.launcher.net.replica import Feed
from torchmuster.launcher.node.remote import files as remote_files
from torchmuster.launcher.node.remote.files import RUN_RECORD, CodeOutputs


class Collected:
    """A session that keeps what it is given."""

    def __init__(self):
        self.files = {}
        self.num_messages = 0

    def send(self, message, *, bulk=False):
        self.num_messages += 1
        before = self.files.get(message.path, b"").ljust(message.offset, b"\0")
        end = message.offset + len(message.data)
        self.files[message.path] = before[: message.offset] + message.data + before[end:]
        return True


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
    stream = Feed(run_dir.path, RUN_RECORD, writer)
    append(run_dir.events, "one\n")
    append(run_dir.rank_log(0, 1), "hello\n")
    stream.look()
    append(run_dir.events, "two\n")
    stream.look()
    log = "logs/main/train/attempt-0/rank-1.log"
    assert writer.files == {"events.jsonl": b"one\ntwo\n", log: b"hello\n"}
    assert writer.num_messages == 3


def test_secret_and_plan_never_leave_the_host_and_the_result_does(run_dir):
    for name in ("secret", "plan.json", "head.json", "result.json", remote_files.TOKEN_FILE):
        append(os.path.join(run_dir.path, name), "x")
    append(run_dir.result + ".1.tmp", "half")
    writer = Collected()
    Feed(run_dir.path, RUN_RECORD, writer).look(is_over=True)
    assert set(writer.files) == {"result.json"}


def test_run_directory_is_private_and_found_again_by_its_token(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    first = remote_files.make_own_run_dir("r1", "t" * 32, "5" * 64)
    assert os.stat(first).st_mode & 0o777 == 0o700
    assert remote_files.make_own_run_dir("r1", "t" * 32, "5" * 64) == first
    with pytest.raises(RunDirectoryError, match="the run directory of `r1` exists already"):
        remote_files.make_own_run_dir("r1", "t" * 32, "6" * 64)


def test_private_file_can_be_read_by_its_owner_only(tmp_path):
    remote_files.write_private(str(tmp_path / "secret"), "ab")
    assert os.stat(tmp_path / "secret").st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_outputs_are_told_from_code_also_in_a_later_session(tmp_path):
    source, run_dir = tmp_path / "source", RunDir(str(tmp_path / "run"))
    source.mkdir(), (tmp_path / "run").mkdir()
    (source / "train.py").write_text("1")
    code = CodeOutputs(run_dir)
    assert not code.is_there
    with (tmp_path / "run" / CODE_FILE).open("wb") as archive:
        code_copy.write_archive(str(source), ["train.py"], archive)
    code.unpack()
    (tmp_path / "run" / "code" / "out.txt").write_text("result")
    later = CodeOutputs(run_dir)
    assert later.is_there
    session = Collected()
    assert later.send(session) == []
    assert set(session.files) == {OUTPUT_FILE}
    (tmp_path / "back.tar.gz").write_bytes(session.files[OUTPUT_FILE])
    with (tmp_path / "back.tar.gz").open("rb") as archive:
        assert code_copy.read_archive(archive, str(tmp_path / "back"), 100) == 1
    assert (tmp_path / "back" / "out.txt").read_text() == "result"
