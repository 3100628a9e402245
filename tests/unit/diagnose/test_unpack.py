"""Packed streams: a part at a time, bounded, and what is damaged ends with one error."""

import bz2
import io
import lzma
import random

import pytest

from torchmuster.diagnose.logs import Stream, by_hand, packing_of, unpacked

DATA = random.Random(1).randbytes(300_000)
PACK = {"xz": lzma.compress, "bz2": bz2.compress}


@pytest.mark.parametrize("packing", ["xz", "bz2"])
def test_several_streams_after_each_other_are_one_file(packing):
    packed = PACK[packing](DATA) + PACK[packing](b"the end")
    plain = unpacked(packing, io.BytesIO(packed))
    parts = list(iter(lambda: plain.read(1000), b""))
    assert b"".join(parts) == DATA + b"the end"
    assert max(map(len, parts)) == 1000


@pytest.mark.parametrize("packing", ["xz", "bz2"])
@pytest.mark.parametrize("cut", [30, 5000])
def test_file_that_ends_too_early_is_an_os_error(packing, cut):
    plain = unpacked(packing, io.BytesIO(PACK[packing](DATA)[:cut]))
    with pytest.raises(OSError, match="ends too early"):
        plain.read(len(DATA))


@pytest.mark.parametrize("packing", ["xz", "bz2"])
def test_damaged_file_is_an_os_error(packing):
    packed = bytearray(PACK[packing](DATA))
    packed[2000:2100] = bytes(100)
    with pytest.raises(OSError, match=r"."):
        unpacked(packing, io.BytesIO(bytes(packed))).read(len(DATA))


def test_xz_file_that_asks_for_much_memory_is_refused():
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    packer = lzma.LZMACompressor(format=lzma.FORMAT_XZ, filters=filters)
    packed = packer.compress(b"x") + packer.flush()
    with pytest.raises(OSError, match=r"(?i)memory"):
        unpacked("xz", io.BytesIO(packed)).read(10)


def test_head_comes_before_the_rest_of_a_stream():
    stream = Stream(b"abc", io.BytesIO(b"def"))
    assert [stream.read(2), stream.read(2), stream.read(9), stream.read(9)] == [
        b"ab",
        b"c",
        b"def",
        b"",
    ]


def test_packing_is_known_by_the_first_bytes():
    assert packing_of(lzma.compress(b"x")) == "xz"
    assert packing_of(bz2.compress(b"x")) == "bz2"
    assert packing_of(b"step 1") is None


def test_command_to_type_quotes_the_name():
    assert by_hand("zstd", "a b.zst") == "zstd -dc 'a b.zst' | muster explain -"
