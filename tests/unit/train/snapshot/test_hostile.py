"""A manifest with a right checksum and wrong contents: an error in words, and no code is run."""

import copy
import functools
import os
import pickle
import sys
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.train.objects import Objects
from torchmuster.train.snapshot.folder import LocalFolder
from torchmuster.train.snapshot.layout import MANIFEST, decode_manifest
from torchmuster.train.snapshot.state import DamagedError, SnapshotError, unpack
from unit.train.snapshot.making import DATA, forge, plain_of, read_newest, save, state_of

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
    return plain_of(_file(folder, 7, MANIFEST).read_bytes())


def _file(folder, step, name):
    from pathlib import Path

    return Path(folder.url) / f"step-{step:09d}" / name


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
    _file(folder, 7, MANIFEST).write_bytes(forge(plain))
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
            _file(folder, 7, name).write_bytes(raw)
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


@pytest.mark.parametrize(
    "text", ["[]", "null", "7", '"text"', "{}", "{", "", "[" * 100_000, '{"a":' * 100_000]
)
def test_a_manifest_that_is_no_manifest_is_damage(text):
    with pytest.raises(DamagedError):
        decode_manifest(forge(text))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"torchmuster-snapshot 2 crc32=00000000 bytes=0\n",
        b"torchmuster-snapshot 1 crc32=00000000 bytes=00\n",
        b"torchmuster-snapshot 1 crc32=0000000 bytes=0\n",
        b"torchmuster-snapshot 1 crc32=00000000 bytes=0",
        b"torchmuster-snapshot 1 crc32=00000000 bytes=999999999999999\n{}",
        b"\x80\x04}.",
    ],
)
def test_a_first_line_that_we_do_not_write_is_damage(raw):
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
    _file(forged_folder, 7, MANIFEST).write_bytes(forge(plain))
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
    path = _file(folder, 7, MANIFEST)
    os.truncate(path, 512 << 20)
    tracemalloc.start()
    with pytest.raises(SnapshotError, match="no good snapshot") as caught:
        read_newest(folder, lambda _: None)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "bytes" in caught.value.why
    assert peak_bytes < 1 << 20
