"""What is loaded: a changed byte anywhere in a snapshot is found, named, and costs only that snapshot; a forged one runs no code."""

import copy
import errno
import functools
import os
import pickle
import random
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.waiting import Clock
from torchmuster.train.objects import Objects
from torchmuster.train.snapshot.folder import LocalFolder
from torchmuster.train.snapshot.layout import MANIFEST, decode_manifest
from torchmuster.train.snapshot.load import Patience
from torchmuster.train.snapshot.state import (
    DamagedError,
    NoGoodSnapshotError,
    SnapshotError,
    UnreadableError,
    unpack,
)
from unit.train.snapshot.making import DATA, forge, plain_of, read_newest, save, state_of

NUM_HARMS = 1000


@pytest.fixture
def folder(tmp_path):
    """Return a folder with good snapshots of steps 1 and 2."""
    made = LocalFolder(str(tmp_path))
    save(made, 1)
    save(made, 2)
    return made


def path_of(folder, step, name):
    return Path(folder.url) / f"step-{step:09d}" / name


def flip(raw, draw):
    harmed = bytearray(raw)
    harmed[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    return bytes(harmed)


def truncate(raw, draw):
    return raw[: draw.randrange(len(raw))]


def zero(raw, draw):
    """Return what a file system may leave after a power cut: a tail of zeros."""
    begin = draw.randrange(len(raw.rstrip(b"\0")))
    return raw[:begin] + bytes(len(raw) - begin)


def lengthen(raw, draw):
    return raw + draw.randbytes(draw.randint(1, 9))


HARMS = (flip, flip, flip, flip, flip, flip, truncate, truncate, zero, lengthen)


def check_found(folder, name):
    """Load; see that step 2's file was named and set aside, and step 1 is what was saved."""
    said = []
    loaded = read_newest(folder, said.append)
    assert loaded is not None
    assert loaded.manifest.step == 1
    values = unpack(loaded.manifest.state["model"], loaded.tensors())
    assert torch.equal(values["weight"], state_of(1)["model"]["weight"])
    (words,) = said
    assert "error: snapshot step-000000002 is damaged" in words
    assert f"at: {path_of(folder, 2, name)}\n" in words
    assert "hint: it was set aside as bad-step-000000002" in words


def test_a_thousand_flips_and_truncations_are_found_and_named(folder):
    draw = random.Random(7)
    whole = {name: path_of(folder, 2, name).read_bytes() for name in (DATA, MANIFEST)}
    bad = Path(folder.url) / "bad-step-000000002"
    for number in range(NUM_HARMS):
        name = draw.choice(sorted(whole))
        harm = HARMS[number % len(HARMS)]
        path_of(folder, 2, name).write_bytes(harm(whole[name], draw))
        check_found(folder, name)
        assert sorted(p.name for p in bad.iterdir()) == sorted(whole)
        (bad / name).write_bytes(whole[name])
        bad.rename(path_of(folder, 2, "x").parent)
    assert read_newest(folder, pytest.fail).manifest.step == 2


@pytest.mark.parametrize("name", [DATA, MANIFEST])
def test_a_missing_file_is_found_and_named(folder, name):
    path_of(folder, 2, name).unlink()
    check_found(folder, name)


def test_a_snapshot_under_another_steps_name_is_found(folder):
    path_of(folder, 1, "x").parent.rename(path_of(folder, 3, "x").parent)
    said = []
    assert read_newest(folder, said.append).manifest.step == 2
    assert "the manifest is that of step 1" in said[0]


def test_two_damaged_ones_of_a_step_are_both_kept(folder):
    for _ in range(2):
        path_of(folder, 2, DATA).write_bytes(b"x")
        check_found(folder, DATA)
        save(folder, 2)
    names = sorted(p.name for p in Path(folder.url).iterdir())
    assert names == [
        "bad-step-000000002",
        "bad-step-000000002-2",
        "step-000000001",
        "step-000000002",
    ]


def test_an_empty_folder_is_no_error(tmp_path):
    assert read_newest(LocalFolder(str(tmp_path / "none")), pytest.fail) is None


def test_when_none_is_good_nothing_is_renamed_and_every_start_says_the_same(folder):
    path_of(folder, 1, DATA).write_bytes(b"x")
    path_of(folder, 2, MANIFEST).unlink()
    before = sorted(p.name for p in Path(folder.url).iterdir())
    for _ in range(3):
        with pytest.raises(NoGoodSnapshotError, match="no good snapshot") as caught:
            read_newest(folder, pytest.fail)
        assert caught.value.muster_final
        assert f"step-000000002/{MANIFEST}" in caught.value.why
        assert f"step-000000001/{DATA}" in caught.value.why
        assert f"mv {folder.url} {folder.url}-damaged" in caught.value.fix
    assert sorted(p.name for p in Path(folder.url).iterdir()) == before


def test_a_folder_with_nothing_but_what_was_set_aside_is_no_beginning(folder):
    folder.set_aside(1)
    folder.set_aside(2)
    with pytest.raises(NoGoodSnapshotError, match="no good snapshot") as caught:
        read_newest(folder, pytest.fail)
    assert "bad-step-000000001 was set aside as damaged before" in caught.value.why


class Faulty(LocalFolder):
    """Gives an error from a draw of its reads and looks, a number of times."""

    def __init__(self, path, number, times):
        super().__init__(path)
        self.number, self.times, self.renamed = number, times, []

    def fail(self):
        if self.times:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))

    def size(self, step, name):
        self.fail()
        return super().size(step, name)

    def read_into(self, step, name, buffer, begin=0):
        self.fail()
        return super().read_into(step, name, buffer, begin)

    def set_aside(self, step):
        self.renamed.append(step)
        return super().set_aside(step)


def patience(said, clock):
    return Patience(said.append, limit_s=60.0, wait=clock.wait, clock=clock)


READING = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT)


@pytest.mark.parametrize("number", READING)
def test_a_storage_that_recovers_costs_no_snapshot(folder, number):
    said, clock = [], Clock(0.0)
    faulty = Faulty(folder.url, number, times=random.Random(number).randint(1, 12))
    assert read_newest(faulty, pytest.fail, patience(said, clock)).manifest.step == 2
    assert faulty.renamed == []
    assert clock.now <= 60.0
    (words,) = said
    assert f"can't be read ({os.strerror(number)}): trying again for up to 60 s" in words


@pytest.mark.parametrize("number", [*READING, errno.EACCES, errno.EPERM])
def test_a_storage_that_gives_only_errors_is_not_taken_for_damage(folder, number):
    faulty, clock = Faulty(folder.url, number, times=-1), Clock(0.0)
    for _ in range(2):
        with pytest.raises(UnreadableError) as caught:
            read_newest(faulty, pytest.fail, patience([], clock))
        assert caught.value.why == os.strerror(number)
        assert not caught.value.muster_final
    assert faulty.renamed == []
    assert faulty.steps() == [2, 1]
    # Rights do not come back by waiting.
    assert (clock.now == 0) == (number in (errno.EACCES, errno.EPERM))


def test_a_folder_that_goes_away_while_it_is_read_proves_no_damage(folder):
    away = Path(folder.url).with_name("away")

    class Leaving(LocalFolder):
        def size(self, step, name):
            if not away.exists():
                Path(self.url).rename(away)
            return super().size(step, name)

    with pytest.raises(UnreadableError):
        read_newest(Leaving(folder.url), pytest.fail, patience([], Clock(0.0)))
    assert LocalFolder(str(away)).steps() == [2, 1]


@pytest.mark.parametrize("name", [DATA, MANIFEST])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_what_is_not_a_plain_file_is_damage_and_never_waited_for(folder, name, make):
    path_of(folder, 2, name).unlink()
    make(path_of(folder, 2, name))
    check_found(folder, name)


# A manifest with a right checksum and wrong contents: an error in words, and no code is run.


pytestmark = pytest.mark.usefixtures("no_unpickling")
_unpickled = []


@functools.cache
def _listen():
    """Note each thing that a pickle looks up; such a hook can't be taken away again."""
    sys.addaudithook(lambda event, args: event == "pickle.find_class" and _unpickled.append(args))


@pytest.fixture
def no_unpickling():
    _listen()
    _unpickled.clear()
    yield
    assert not _unpickled


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Thing:
    """Takes any state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Return the JSON value of a good manifest of step 7."""
    folder = LocalFolder(str(tmp_path_factory.mktemp("good")))
    save(folder, 7)
    return plain_of(path_of(folder, 7, MANIFEST).read_bytes())


def load(folder):
    """Load the newest snapshot into things of any kind, as a run does."""
    loaded = read_newest(folder, lambda _: None)
    names = [name for name in loaded.manifest.state if name != "muster"]
    Objects({name: Thing() for name in names}).load(loaded, folder)
    for rank in loaded.manifest.ranks.values():
        unpack(rank, {})


def load_forged(tmp_path, plain):
    folder = LocalFolder(str(tmp_path / "snapshots"))
    save(folder, 7)
    path_of(folder, 7, MANIFEST).write_bytes(forge(plain))
    load(folder)


def test_the_unpickling_of_a_bomb_would_be_seen(tmp_path):
    """Were it not, the other tests here could not fail."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "bomb")))
    assert (tmp_path / "bomb").is_dir()
    assert _unpickled
    _unpickled.clear()


@pytest.mark.parametrize("where", ["data", "manifest", "bytes", "whole folder"])
def test_a_pickle_in_a_snapshot_is_never_unpickled(tmp_path, good, where):
    raw = pickle.dumps(Bomb(tmp_path / "bomb"))
    folder = LocalFolder(str(tmp_path / "snapshots"))
    if where == "data":
        save(folder, 7, state={"model": {"w": torch.frombuffer(bytearray(raw), dtype=torch.uint8)}})
        load(folder)
    elif where == "bytes":
        save(folder, 7, state={"thing": {"blob": raw}})
        load(folder)
    else:
        save(folder, 7)
        for name in (MANIFEST,) if where == "manifest" else (MANIFEST, DATA):
            path_of(folder, 7, name).write_bytes(raw)
        with pytest.raises(SnapshotError, match="no good snapshot"):
            load(folder)
    assert not (tmp_path / "bomb").exists()


def test_loading_calls_neither_torch_load_nor_the_unpickler(tmp_path, monkeypatch):
    def never(*_args, **_kwargs):
        raise AssertionError("it was called")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, never)
    folder = LocalFolder(str(tmp_path))
    save(folder, 7)
    load(folder)


def _tensor(plain, **changes):
    """Change one box of `model.weight`, which is `[dtype, shape, [[offsets, sizes, file, begin]]]`."""
    row = plain["tensors"]["model.weight"]
    for key, value in changes.items():
        if key in ("dtype", "shape"):
            row[("dtype", "shape").index(key)] = value
        else:
            row[2][0][("offsets", "sizes", "file", "begin").index(key)] = value


def _put(plain, *path, value):
    for key in path[:-1]:
        plain = plain[key]
    plain[path[-1]] = value


def _deep(plain):
    for _ in range(400):
        plain["state"] = {"x": plain["state"]}


FORGERIES = {
    "huge begin": lambda p: _tensor(p, begin=1 << 60),
    "begin above 64 bits": lambda p: _tensor(p, begin=1 << 80),
    "negative begin": lambda p: _tensor(p, begin=-64),
    "begin that no tensor has": lambda p: _tensor(p, begin=1),
    "begin of text": lambda p: _tensor(p, begin="0"),
    "negative offset": lambda p: _tensor(p, offsets=[-1, 0]),
    "huge offset": lambda p: _tensor(p, offsets=[1 << 60, 0]),
    "offset of a fraction": lambda p: _tensor(p, offsets=[0.5, 0]),
    "too few offsets": lambda p: _tensor(p, offsets=[0]),
    "negative sizes": lambda p: _tensor(p, sizes=[-3, -5]),
    "one negative size": lambda p: _tensor(p, sizes=[-1, 5]),
    "sizes of lists": lambda p: _tensor(p, sizes=[[3], [5]]),
    "box smaller than its tensor": lambda p: _tensor(p, sizes=[2, 5]),
    "huge shape": lambda p: _tensor(p, shape=[1 << 40, 1 << 40], sizes=[1 << 40, 1 << 40]),
    "huge empty shape": lambda p: _tensor(
        p, shape=[1 << 40, 1 << 40, 0], sizes=[1 << 40, 1 << 40, 0]
    ),
    "other dtype": lambda p: _tensor(p, dtype="complex128"),
    "dtype that is a function": lambda p: _tensor(p, dtype="load"),
    "dtype that is no text": lambda p: _tensor(p, dtype=["float32"]),
    "box in an unknown file": lambda p: _tensor(p, file="data-00009.bin"),
    "box in another place": lambda p: _tensor(p, file="../../../etc/passwd"),
    "no boxes": lambda p: _put(p, "tensors", "model.weight", 2, value=[]),
    "a box twice": lambda p: p["tensors"]["model.weight"][2].append(
        copy.deepcopy(p["tensors"]["model.weight"][2][0])
    ),
    "file above the folder": lambda p: p["files"].update({"../../secret": [3, 0]}),
    "file with an absolute path": lambda p: p["files"].update({"/etc/passwd": [3, 0]}),
    "file with a newline": lambda p: p["files"].update({"data-00001.bin\n": [3, 0]}),
    "file that is not there": lambda p: p["files"].update({"data-00001.bin": [3, 0]}),
    "file of negative size": lambda p: p["files"][DATA].__setitem__(0, -1),
    "file of infinite size": lambda p: p["files"][DATA].__setitem__(0, float("inf")),
    "huge file": lambda p: p["files"][DATA].__setitem__(0, 1 << 61),
    "file without a checksum": lambda p: p["files"].update({DATA: [1]}),
    "files that are a list": lambda p: p.update(files=[DATA]),
    "tensors that are a list": lambda p: p.update(tensors=[1]),
    "tensors that are none": lambda p: p.update(tensors={}),
    "state that is text": lambda p: p.update(state="text"),
    "state that is none": lambda p: p.update(state=None),
    "state nested deeply": _deep,
    "state with a forged tensor": lambda p: _put(
        p, "state", "model", "weight", "path", value="other"
    ),
    "state with an unknown tag": lambda p: _put(p, "state", "model", "weight", "$", value="call"),
    "ranks that are a list": lambda p: p.update(ranks=[1]),
    "rank that is no number": lambda p: p.update(ranks={"zero": {}}),
    "rank that is missing": lambda p: p.update(ranks={}),
    "rank that is text": lambda p: p.update(ranks={"0": "text"}),
    "other step": lambda p: p.update(step=8),
    "step that is no number": lambda p: p.update(step=None),
    "step that is infinite": lambda p: p.update(step=float("inf")),
    "world of a billion": lambda p: p.update(world_size=1_000_000_000),
    "world below zero": lambda p: p.update(world_size=0),
    "step that is true": lambda p: p.update(step=True),
    "negative epoch": lambda p: p.update(epoch=-1),
    "unknown kind": lambda p: p.update(kind="pickle"),
    **{f"without {key}": (lambda p, key=key: p.pop(key)) for key in ("step", "files", "state")},
    **{f"no {key}": (lambda p, key=key: p.pop(key)) for key in ("tensors", "ranks", "kind")},
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_an_error_in_words(tmp_path, good, name):
    plain = copy.deepcopy(good)
    FORGERIES[name](plain)
    with pytest.raises(SnapshotError):
        load_forged(tmp_path, plain)


NO_MANIFESTS = ("[]", "null", "7", '"text"', "{}", "{", "", "[" * 100_000, '{"a":' * 100_000)


@pytest.mark.parametrize(
    "raw",
    [
        *map(forge, NO_MANIFESTS),
        # First lines that we do not write.
        b"",
        b"torchmuster-snapshot 2 crc32=00000000 bytes=0\n",
        b"torchmuster-snapshot 1 crc32=00000000 bytes=00\n",
        b"torchmuster-snapshot 1 crc32=0000000 bytes=0\n",
        b"torchmuster-snapshot 1 crc32=00000000 bytes=0",
        b"torchmuster-snapshot 1 crc32=00000000 bytes=999999999999999\n{}",
        b"\x80\x04}.",
    ],
    ids=lambda raw: repr(raw[:90]),
)
def test_a_manifest_that_is_no_manifest_is_damage(raw):
    with pytest.raises(DamagedError):
        decode_manifest(raw)


def test_a_newer_format_is_named():
    raw = b"torchmuster-snapshot 7 crc32=00000000 bytes=0\n"
    with pytest.raises(DamagedError, match="has format 7, this version reads 1"):
        decode_manifest(raw)


_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from(["", "$", "tensor", DATA, "float32", "../x", "-1", "whole", "sharded"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "v", "path", "0", "model"]), inner, max_size=3),
    ),
    max_leaves=5,
)


def _places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (dict, list)):
            yield from _places(item, (*path, key))
        else:
            yield (*path, key)


@pytest.fixture(scope="module")
def forged_folder(tmp_path_factory):
    return LocalFolder(str(tmp_path_factory.mktemp("forged")))


@given(st.data())
def test_any_value_in_any_place_of_a_manifest_loads_or_is_an_error_in_words(
    forged_folder, good, data
):
    plain = copy.deepcopy(good)
    place = data.draw(st.sampled_from(sorted(_places(plain), key=repr)[1:]))
    _put(plain, *place, value=data.draw(_JSON))
    if not forged_folder.steps():
        save(forged_folder, 7)
    path_of(forged_folder, 7, MANIFEST).write_bytes(forge(plain))
    try:
        load(forged_folder)
    except SnapshotError as error:
        assert error.what  # noqa: PT017 (many values are right)


def test_the_good_manifest_of_these_tests_loads(tmp_path, good):
    load_forged(tmp_path, good)
    assert sorted(good["state"]) == sorted(state_of(7))


def test_a_huge_manifest_is_refused_by_its_first_line(tmp_path):
    """It is not read: half a gigabyte of nothing costs nothing on a disk."""
    folder = LocalFolder(str(tmp_path))
    save(folder, 7)
    path = path_of(folder, 7, MANIFEST)
    os.truncate(path, 512 << 20)
    tracemalloc.start()
    with pytest.raises(SnapshotError, match="no good snapshot") as caught:
        read_newest(folder, lambda _: None)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "bytes" in caught.value.why
    assert peak_bytes < 1 << 20
