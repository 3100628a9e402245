"""What hosts send lands in the run directory, at its place, and nowhere else."""

import pytest

from kit.waiting import wait_until
from torchmuster.core.files.layout import RunDir
from torchmuster.launcher.engines import ssh_files
from torchmuster.launcher.engines.ssh_files import FetchedFiles, own_paths
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.net import replica
from torchmuster.launcher.net.remote_messages import OUTPUT_FILE, FilePiece, FrameError
from torchmuster.launcher.node.remote.files import ReturnedOutputs


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(str(tmp_path))


def piece(path, offset, data):
    return FilePiece(path=path, offset=offset, data=data)


class Host:
    """A host that notes what it is sent."""

    placed = None

    def __init__(self, name):
        self.host = self
        self.name = name
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def back_to(run_dir, said=None):
    return FetchedFiles(run_dir, (said if said is not None else []).append)


def test_pieces_land_at_their_places_also_twice(run_dir, tmp_path):
    back, host = back_to(run_dir), Host("n1")
    for offset, data in ((0, b"one\n"), (4, b"two\n"), (4, b"two\n")):
        back.take(piece("logs/main/rank-0.log", offset, data), host)
    assert (tmp_path / "logs/main/rank-0.log").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("name", ["secret", "plan.json", "owner.json", "head.json"])
def test_files_of_the_client_are_not_overwritten(run_dir, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(FrameError):
        back_to(run_dir).take(piece(name, 0, b"theirs"), Host("n1"))
    assert (tmp_path / name).read_text() == "mine"


def test_a_link_is_not_followed(run_dir, tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "target")
    back = back_to(run_dir)
    back.take(piece("events.jsonl", 0, b"theirs"), Host("n1"))
    assert (tmp_path / "target").read_text() == "mine"
    assert list(back.copy_of("n1").left_out) == ["events.jsonl"]


def test_a_full_disk_is_told_and_what_follows_comes_again(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(ssh_files, "_AGAIN_S", 0.01)
    said, host = [], Host("n1")
    back = back_to(run_dir, said)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(replica.os, "pwrite", full)
        back.take(piece("events.jsonl", 0, b"theirs"), host)
        back.take(piece("events.jsonl", 6, b" too"), host)
    wait_until(lambda: host.sent, "the host to be asked to go back")
    assert [(message.mark, message.files) for message in host.sent] == [
        ("", {"events.jsonl": (0, 0)})
    ]
    assert said == [
        "the record of n1 can't be written here: No space left on device; it is tried again"
    ]
    back.take(piece("events.jsonl", 0, b"theirs too"), host)
    assert (tmp_path / "events.jsonl").read_text() == "theirs too"


@pytest.mark.parametrize("name", ["job.json", "losses.json"])
def test_what_the_client_acts_upon_is_its_own(run_dir, tmp_path, name):
    back_to(run_dir).take(piece(name, 0, b"theirs"), Host("n1"))
    assert not (tmp_path / name).exists()


def test_outputs_land_in_a_folder_of_the_host(run_dir, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "out.txt").write_text("1")
    with (tmp_path / "archive").open("w+b") as archive:
        code_copy.write_archive(str(source), ["out.txt"], archive)
        archive.seek(0)
        back, offset = ReturnedOutputs(run_dir), 0
        while data := archive.read(64):
            back.take(piece(OUTPUT_FILE, offset, data), "n1")
            offset += len(data)
    assert back.unpack("n1", str(tmp_path / "output" / "n1")) == 1
    assert (tmp_path / "output" / "n1" / "out.txt").read_text() == "1"
    assert not list(tmp_path.glob("output-*.part"))


def test_record_of_a_new_head_stands_behind_that_of_the_old_one(run_dir, tmp_path):
    back, old, new = back_to(run_dir), Host("a"), Host("b")
    back.take(piece("events.jsonl", 0, b"old\n"), old)
    back.append_from("b")
    back.take(piece("events.jsonl", 0, b"new\n"), new)
    back.take(piece("events.jsonl", 4, b"late\n"), old)
    back.take(piece("logs/x.log", 0, b"own\n"), new)
    assert (tmp_path / "events.jsonl").read_bytes() == b"old\nnew\n"
    assert (tmp_path / "logs/x.log").read_bytes() == b"own\n"
    back.take(piece("events.jsonl", 0, b"again\n"), new)
    assert (tmp_path / "events.jsonl").read_bytes() == b"old\nagain\n"


def test_a_new_head_does_not_go_on_in_half_a_line_of_the_old_one(run_dir, tmp_path):
    back = back_to(run_dir)
    back.take(piece("events.jsonl", 0, b"old\nhal"), Host("a"))
    back.append_from("b")
    back.take(piece("events.jsonl", 0, b"new\n"), Host("b"))
    assert (tmp_path / "events.jsonl").read_bytes() == b"old\nhal\nnew\n"


def test_paths_of_what_came_back_become_ours_and_others_stay():
    text = "see /h/r/logs/x.log and /h/r/code/a.py, not /h/r/snapshots/3 nor /h/run/logs/x"
    ours = "see /c/r/logs/x.log and /src/a.py, not /h/r/snapshots/3 nor /h/run/logs/x"
    value = {"hint": [text, 1], "at": None}
    assert own_paths(value, "/h/r", "/c/r", "/src") == {"hint": [ours, 1], "at": None}


def test_code_that_was_not_copied_keeps_its_path():
    assert own_paths("/h/r/code/a.py", "/h/r", "/c/r", None) == "/h/r/code/a.py"
