"""zstd is unpacked by what is there: a module of Python, a package, or the program."""

import io
import lzma
import random
import shutil
import subprocess
import sys
import threading
import types

import pytest

from torchmuster.diagnose import logs
from torchmuster.diagnose.logs import can_unpack, unpacked

DATA = random.Random(1).randbytes(300_000) + b"a line of text\n" * 20_000
needs_program = pytest.mark.skipif(shutil.which("zstd") is None, reason="no program zstd")


def pack(data, *options):
    done = subprocess.run(["zstd", "-cq", *options], input=data, capture_output=True, check=True)
    return done.stdout


def read_all(plain):
    try:
        return list(iter(lambda: plain.read(1000), b""))
    finally:
        if isinstance(plain, logs.ZstdProgram):
            plain.close()


@pytest.fixture
def no_module(monkeypatch):
    monkeypatch.setattr(logs, "new_frame", lambda: None)


@pytest.fixture(params=["module", "program"])
def way(request, monkeypatch):
    if request.param == "program":
        monkeypatch.setattr(logs, "new_frame", lambda: None)
    elif logs.new_frame() is None:
        pytest.skip("neither Python 3.14 nor the package zstandard")


@needs_program
def test_several_frames_after_each_other_are_one_file(way):
    plain = unpacked("zstd", io.BytesIO(pack(DATA) + pack(b"the end")))
    parts = read_all(plain)
    assert b"".join(parts) == DATA + b"the end"
    assert max(map(len, parts)) == 1000


@needs_program
@pytest.mark.parametrize("cut", [30, 200_000])
def test_file_that_ends_too_early_is_an_os_error(way, cut):
    plain = unpacked("zstd", io.BytesIO(pack(DATA)[:cut]))
    with pytest.raises(OSError, match="ends too early"):
        read_all(plain)


@needs_program
def test_damaged_file_is_an_os_error(way):
    packed = bytearray(pack(b"a line of text, and another one\n" * 90_000))
    packed[20:60] = bytes(40)
    plain = unpacked("zstd", io.BytesIO(bytes(packed)))
    with pytest.raises(OSError, match=r"."):
        read_all(plain)


@needs_program
def test_file_that_asks_for_much_memory_is_refused(way):
    packed = pack(bytes(1 << 20), "--ultra", "--long=31", "--no-content-size")
    with pytest.raises(OSError, match=r"."):
        read_all(unpacked("zstd", io.BytesIO(packed)))


@needs_program
def test_a_bomb_gives_no_more_than_asked_for(way):
    plain = unpacked("zstd", io.BytesIO(pack(bytes(8 << 20))))
    assert max(map(len, read_all(plain))) == 1000


@needs_program
def test_program_that_nobody_reads_any_more_ends(no_module):
    plain = unpacked("zstd", io.BytesIO(pack(DATA * 20)))
    assert plain.read(10) == DATA[:10]
    before = threading.active_count()
    plain.close()
    assert threading.active_count() <= before


def test_module_of_python_3_14_comes_first(monkeypatch):
    own = types.SimpleNamespace(ZstdDecompressor=lzma.LZMADecompressor)
    monkeypatch.setitem(sys.modules, "compression", types.ModuleType("compression"))
    monkeypatch.setitem(sys.modules, "compression.zstd", own)
    assert unpacked("zstd", io.BytesIO(lzma.compress(DATA))).read(len(DATA)) == DATA


def test_without_any_way_it_is_an_os_error(no_module, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert not can_unpack("zstd")
    with pytest.raises(OSError, match="zstd is not unpacked here"):
        unpacked("zstd", io.BytesIO(b"\x28\xb5\x2f\xfd"))
