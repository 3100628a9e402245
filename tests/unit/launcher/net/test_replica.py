"""A copy of growing files is what they are: however they grow, are cut short or replaced, whoever begins again, wherever the way is cut."""

import os
import random
import zlib
from pathlib import Path

import pytest

from torchmuster.core.model.codec import CodecError
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net import replica
from torchmuster.launcher.net.remote_messages import CopyHas, FilePiece, FrameError
from torchmuster.launcher.net.replica import Copy, CopyScope, CopyState, Feed

SCOPE = CopyScope(("events.jsonl", "logs/**"), ("*",), frozenset({"secret"}))


class Way:
    """A way that carries so many bytes, and is cut then."""

    def __init__(self, copy, room=1 << 40):
        self.copy, self.room = copy, room
        self.num_bytes = 0

    def send(self, message, *, bulk=False):
        self.room -= len(messages.pack(message))
        if self.room < 0:
            return False
        self.num_bytes += len(message.data)
        self.copy.take(message)
        return True


class Source:
    """A folder in which files grow; time passes with each change, as between two looks of a feed."""

    def __init__(self, root, seed):
        self.root, self.random = str(root), random.Random(seed)
        self._now_ns = 1_800_000_000 * 10**9

    def _path(self):
        name = self.random.choice(("events.jsonl", "logs/a.log", "logs/main/b.log"))
        path = os.path.join(self.root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def _bytes(self):
        return self.random.randbytes(self.random.choice((0, 1, 40, 600, 5000, 9000)))

    def _note(self, path):
        self._now_ns += 10**7
        os.utime(path, ns=(self._now_ns, self._now_ns))

    def change(self):
        path, kind = self._path(), self.random.choice(("grow", "grow", "grow", "cut", "rotate"))
        if kind == "rotate" and os.path.exists(path):
            os.replace(path, f"{path}.1")
        elif kind == "cut" and os.path.exists(path):
            os.truncate(path, self.random.randint(0, os.path.getsize(path)))
        with open(path, "ab") as file:
            file.write(self._bytes())
        self._note(path)


def files_below(root):
    paths = (path for path in Path(root).rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source/logs").mkdir(parents=True)
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path):
    (tmp_path / "copy").mkdir()
    return tmp_path / "copy"


@pytest.fixture
def begun(source, target):
    """Return an empty copy, and the feed that fills it."""
    copy = Copy(str(target), SCOPE)
    return copy, Feed(str(source), SCOPE, Way(copy))


def known_of(copy):
    known = CopyState()
    for has in copy.has():
        known.take(has)
    return known


def carry(source, copy, room=1 << 40, **kind):
    """Let a new feed send what a new session may carry."""
    way = Way(copy, room)
    known = known_of(copy)
    if not copy.begin("disk-1"):
        known = None
    Feed(str(source), SCOPE, way, known).look(**kind)
    return way


@pytest.mark.parametrize("seed", range(60))
def test_a_copy_is_what_its_source_is(source, target, monkeypatch, seed):
    monkeypatch.setattr(replica, "CHUNK_BYTES", 2000)
    source, target = Source(source, seed), str(target)
    random_ = source.random
    copy, feed, way = Copy(target, SCOPE, ""), None, None
    for _ in range(60):
        for _ in range(random_.randint(0, 3)):
            source.change()
        if random_.random() < 0.2:  # who keeps the copy begins again
            copy, feed = Copy(target, SCOPE, "disk-1"), None
        if feed is None or way.room < 0 or random_.random() < 0.2:  # the session, anyhow
            way = Way(copy, random_.choice((0, 100, 3000, 20000, 1 << 40)))
            known = known_of(copy)
            feed = Feed(source.root, SCOPE, way, known if copy.begin("disk-1") else None)
        feed.look()
        if way.room >= 0:
            there = files_below(target)
            assert {
                path: data
                for path, data in files_below(source.root).items()
                if there.get(path) != data and not path.endswith(".1")
            } == {}
    carry(source.root, copy, is_over=True)
    assert files_below(target) == files_below(source.root)


def test_what_has_come_is_not_sent_again(source, target):
    (source / "events.jsonl").write_bytes(b"x" * 1_000_000)
    first = carry(source, Copy(str(target), SCOPE, ""), room=800_000)
    assert 0 < first.num_bytes < 800_000
    second = carry(source, Copy(str(target), SCOPE, "disk-1"))
    assert first.num_bytes + second.num_bytes == 1_000_000


def test_nothing_is_read_of_a_file_that_has_not_changed(source, begun, monkeypatch):
    _, feed = begun
    (source / "events.jsonl").write_bytes(b"x")
    feed.look()
    monkeypatch.setattr(replica.os, "open", lambda *_: pytest.fail("opened"))
    feed.look()


def test_a_disk_that_is_full_for_a_while_loses_nothing(source, target, begun, monkeypatch):
    copy, feed = begun
    (source / "events.jsonl").write_bytes(bytes(range(256)) * 4000)
    room, pwrite = [300_000], os.pwrite

    def full(fd, data, offset):
        if offset >= room[0]:
            raise OSError(28, "No space left on device")
        return pwrite(fd, bytes(data)[: room[0] - offset], offset)

    monkeypatch.setattr(replica.os, "pwrite", full)
    feed.look()
    assert (copy.is_whole, copy.trouble.strerror) == (False, "No space left on device")
    room[0] = 1 << 40
    feed.go_back(known_of(copy))
    feed.look()
    assert copy.is_whole
    assert (target / "events.jsonl").read_bytes() == bytes(range(256)) * 4000


def test_a_file_that_can_not_be_read_is_named_until_it_can(tmp_path, source, begun):
    _, feed = begun
    (source / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    feed.look()
    assert list(feed.unread) == ["events.jsonl"]
    (source / "events.jsonl").unlink()
    (source / "events.jsonl").write_text("one")
    feed.look()
    assert feed.unread == {}


@pytest.mark.parametrize(
    "path", ["secret", "secret/x", "other/file", "logs", "logs.tmp", "groups/g/events.jsonl"]
)
def test_what_is_not_in_the_scope_is_refused(tmp_path, path):
    scope = CopyScope(("events.jsonl", "logs/**"), ("*.json",), frozenset({"secret"}))
    with pytest.raises(FrameError):
        Copy(str(tmp_path), scope).take(FilePiece(path=path, offset=0, data=b"x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("pattern", "path", "has"),
    [
        ("logs/**", "logs/a", True),
        ("logs/**", "logs/a/b/c.log", True),
        ("logs/**", "logs", False),
        ("logs/**", "log/a", False),
        ("*", "a", True),
        ("*", "a/b", False),
        ("tasks/*/training/attempt-*/*/events.jsonl", "tasks/t/training/attempt-0/r/events.jsonl", True),
        ("tasks/*/training/attempt-*/*/events.jsonl", "tasks/t/u/training/attempt-0/r/events.jsonl", False),
        ("tasks/*/training/attempt-*/*/logs/**", "tasks/t/training/attempt-0/r/logs/x/y", True),
    ],
)  # fmt: skip
def test_a_pattern_says_the_same_of_a_path_and_of_a_folder(tmp_path, pattern, path, has):
    scope = CopyScope((pattern,))
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("x")
    assert scope.has(path) is has
    assert list(scope.files(str(tmp_path))) == [path] * has


def test_only_small_files_settle_and_only_at_the_end(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "result.json.1.tmp").write_text("{}")
    (tmp_path / "secret").write_text("s")
    (tmp_path / "core").write_bytes(bytes(replica.MAX_SMALL_BYTES + 1))
    (tmp_path / "link").symlink_to("secret")
    assert list(SCOPE.files(str(tmp_path))) == []
    assert list(SCOPE.files(str(tmp_path), is_over=True)) == ["result.json"]


def test_a_record_of_many_files_is_told_in_several_messages(tmp_path, monkeypatch):
    monkeypatch.setattr(replica, "_MESSAGE_BYTES", 300)
    (tmp_path / "logs").mkdir()
    for number in range(7):
        (tmp_path / "logs" / str(number)).write_text(str(number))
    said = list(Copy(str(tmp_path), SCOPE, "m").has())
    assert [(len(has.files), has.more) for has in said] == [(3, True), (3, True), (1, False)]
    known = CopyState()
    assert [known.take(messages.decode(messages.encode(has))) for has in said] == [0, 0, 1]
    assert known.files["logs/6"] == (1, zlib.crc32(b"66"))


def test_names_of_any_bytes_travel(source, target):
    for number in range(3000):
        name = os.fsdecode(b"\xff" * 200 + str(number).encode())
        (source / "logs" / name).write_text("x")
    copy = Copy(str(target), SCOPE, "")
    carry(source, copy)
    said = [messages.pack(has) for has in copy.has()]  # raises for one that is too long
    assert len(said) > 1
    assert files_below(target) == files_below(source)


def test_a_file_that_somebody_else_cuts_is_not_held_and_comes_again(source, target, begun):
    copy, feed = begun
    (source / "events.jsonl").write_bytes(b"0123456789" * 100)
    feed.look()
    assert copy.is_in_place
    os.truncate(target / "events.jsonl", 10)
    assert not copy.is_in_place
    with (source / "events.jsonl").open("ab") as file:
        file.write(b"more")
    feed.look()
    assert not copy.is_whole
    feed.go_back(known_of(copy))
    feed.look()
    assert copy.is_in_place
    assert (target / "events.jsonl").read_bytes() == (source / "events.jsonl").read_bytes()


def test_a_file_that_becomes_a_folder_makes_way(source, target):
    (source / "logs/a").write_text("one")
    copy = Copy(str(target), SCOPE, "")
    carry(source, copy)
    (source / "logs/a").unlink(), (source / "logs/a").mkdir()
    (source / "logs/a/x").write_text("two")
    carry(source, copy)
    assert files_below(target) == {"logs/a/x": b"two"}


def test_one_path_that_can_not_be_here_stops_no_other(target):
    (target / "result.json").mkdir()
    copy = Copy(str(target), SCOPE, most_bytes=100)
    for path, data in (("result.json", b"x"), ("logs/big", b"x" * 101), ("logs/a", b"a")):
        assert copy.take(FilePiece(path=path, offset=0, data=data))
    large = "it is larger than 100 bytes"
    assert copy.left_out == {"result.json": "Is a directory", "logs/big": large}
    assert (target / "logs/a").read_bytes() == b"a"
    assert (target / "result.json").is_dir()


def test_a_folder_that_can_not_be_read_is_named_and_the_others_are_sent(
    source, target, begun, monkeypatch
):
    _, feed = begun
    for name in "abc":
        (source / "logs" / name).mkdir()
        (source / "logs" / name / "x").write_text(name)
    scandir = os.scandir

    def refuse(path):
        if str(path).rstrip("/").endswith("/b"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(replica.os, "scandir", refuse)
    feed.look(is_over=True)
    assert feed.unread == {"logs/b/": "Permission denied"}
    monkeypatch.undo()
    assert sorted(files_below(target)) == ["logs/a/x", "logs/c/x"]


def test_folders_in_each_other_have_an_end(tmp_path):
    path = tmp_path / "logs" / "/".join("d" * 80)
    path.mkdir(parents=True)
    (path / "x").write_text("x")
    unread = {}
    assert list(SCOPE.files(str(tmp_path), unread=unread)) == []
    assert list(unread.values()) == ["too many folders in each other"]


@pytest.mark.parametrize("path", ["logs/\ud800", "logs/" + "a/" * 70 + "x"])
def test_a_hostile_name_is_no_message(path):
    with pytest.raises(CodecError):
        FilePiece(path=path, offset=0, data=b"")


@pytest.mark.parametrize("size", [-5, -(10**30), 10**30])
def test_a_copy_of_an_impossible_size_is_refused(size):
    with pytest.raises(FrameError):
        CopyState().take(CopyHas(mark="", files={"events.jsonl": (size, 0)}))


def test_more_files_than_any_record_has_are_refused(monkeypatch):
    monkeypatch.setattr(replica, "_MAX_FILES", 2)
    files = {str(number): (0, 0) for number in range(3)}
    with pytest.raises(FrameError):
        CopyState().take(CopyHas(mark="", files=files))
