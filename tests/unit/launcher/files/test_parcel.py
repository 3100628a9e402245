"""A parcel: what goes in comes out, and what is damaged or hostile does not."""

import hashlib
import os
import struct
import zlib

import pytest

from torchmuster.launcher.files import environment
from torchmuster.launcher.files.environment import (
    FILE,
    LINK,
    NOTES,
    PIECE_BYTES,
    PROGRAM,
    ParcelError,
    ParcelFile,
    ParcelWriter,
    Unpacker,
)

PLENTY = 1 << 40


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def packed(path, entries, notes=None):
    with open(path, "wb") as file:
        writer = ParcelWriter(file)
        for kind, name, content in entries:
            writer.add(kind, name, content)
        sha = writer.finish(notes or {})
        writer.close()
    return sha, writer


def stream_of(*entries):
    """Return a stream that no writer of ours makes."""
    found = b""
    for kind, name, size, content in entries:
        found += struct.pack(">cHQ", kind, len(name), size) + name + content
    return found


def file_named(name, content=b"x"):
    return (FILE, name, len(content), content)


def unpack(stream, root, max_bytes=PLENTY, max_files=100):
    unpacker = Unpacker(str(root), max_bytes, max_files)
    try:
        unpacker.feed(stream)
        return unpacker.finish()
    finally:
        unpacker.close()


END = (NOTES, b"", 2, b"{}")


def test_what_goes_in_comes_out(tmp_path, root):
    large = os.urandom(PIECE_BYTES * 2 + 7)
    entries = [
        (FILE, "env/large", large),
        (FILE, "env/empty", b""),
        (PROGRAM, "env/bin/tool", b"text " * 100_000),
        (LINK, "env/bin/other", b"tool"),
        (LINK, "env/lib64", b"lib"),
    ]
    sha, writer = packed(tmp_path / "p", entries, {"a": 1})
    kept = ParcelFile(str(tmp_path / "p"), sha, writer.num_pieces)
    assert writer.size_bytes == (tmp_path / "p").stat().st_size
    unpacker = Unpacker(str(root), writer.unpacked_bytes, writer.num_files)
    for index, piece in enumerate(kept.pieces):
        content = piece.content(kept.piece(index))
        for at in range(0, len(content), 100_003):  # heads are cut anywhere
            unpacker.feed(content[at : at + 100_003])
    kept.close()
    assert unpacker.finish() == {"a": 1}
    assert (root / "env/large").read_bytes() == large
    assert (root / "env/empty").read_bytes() == b""
    assert (root / "env/bin/other").read_bytes() == b"text " * 100_000
    assert os.access(root / "env/bin/tool", os.X_OK)
    assert not os.access(root / "env/large", os.X_OK) or not (root / "env/large").stat().st_mode & 1
    assert os.readlink(root / "env/lib64") == "lib"


def test_a_stream_is_read_the_same_however_it_is_cut(root):
    stream = stream_of(file_named(b"a/b", b"12345"), (LINK, b"a/c", 1, b"b"), END)
    unpacker = Unpacker(str(root), 100, 3)
    for byte in stream:
        unpacker.feed(bytes([byte]))
    unpacker.finish()
    assert (root / "a/c").read_bytes() == b"12345"


def test_only_what_gets_smaller_is_compressed(tmp_path):
    sha, writer = packed(tmp_path / "p", [(FILE, "a", os.urandom(PIECE_BYTES * 2))])
    pieces = ParcelFile(str(tmp_path / "p"), sha, writer.num_pieces).pieces
    assert [piece.is_compressed for piece in pieces[:2]] == [False, False]
    sha, writer = packed(tmp_path / "q", [(FILE, "a", bytes(PIECE_BYTES * 2))])
    assert all(p.is_compressed for p in ParcelFile(str(tmp_path / "q"), sha, 3).pieces[:2])
    assert writer.size_bytes < 50_000


def test_the_same_files_have_the_same_name(tmp_path):
    entries = [(FILE, "a", b"x" * 3_000_000), (LINK, "b", b"a")]
    assert packed(tmp_path / "p", entries)[0] == packed(tmp_path / "q", entries)[0]
    assert packed(tmp_path / "r", entries[:1])[0] != packed(tmp_path / "q", entries)[0]


@pytest.mark.parametrize(
    "name", [b"../x", b"/etc/x", b"a/../../x", b"a//x", b"./x", b"", b"a/", b"x\0y"]
)
def test_a_name_that_leaves_the_folder_is_refused(root, name):
    with pytest.raises(ParcelError, match="leaves its folder"):
        unpack(stream_of(file_named(name), END), root)
    assert os.listdir(root.parent) == ["root"]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (b"x", b"/etc"),
        (b"x", b"../x"),
        (b"a/x", b"../../y"),
        (b"x", b"a/../../y"),  # behind another link that is one level more
        (b"x", b""),
        (b"x", b"y\0z"),
    ],
)
def test_a_link_that_leaves_the_folder_is_refused(root, name, target):
    with pytest.raises(ParcelError, match="leaves its folder"):
        unpack(stream_of((LINK, name, len(target), target), file_named(b"z"), END), root)


def test_nothing_is_written_through_a_link(root):
    stream = stream_of((LINK, b"a", 1, b"b"), file_named(b"b/x"), file_named(b"a/y"), END)
    with pytest.raises(OSError, match="exists"):
        unpack(stream, root)


def test_a_file_that_comes_twice_is_refused(root):
    with pytest.raises(FileExistsError):
        unpack(stream_of(file_named(b"a"), file_named(b"a"), END), root)
    with pytest.raises(ParcelError, match="file and a folder"):
        unpack(stream_of(file_named(b"b"), file_named(b"b/c"), END), root)


@pytest.mark.parametrize("kind", [b"d", b"c", b"b", b"p", b"h", b"\0"])
def test_devices_pipes_and_hard_links_can_t_be_said(root, kind):
    with pytest.raises(ParcelError, match="is not a file"):
        unpack(stream_of((kind, b"a", 0, b""), END), root)


def test_more_than_was_announced_is_refused_before_it_is_written(root):
    with pytest.raises(ParcelError, match="more than was announced"):
        unpack(stream_of((FILE, b"a", 1 << 60, b"x")), root, max_bytes=1 << 30)
    with pytest.raises(ParcelError, match="more than was announced"):
        unpack(stream_of(file_named(b"a"), file_named(b"b"), END), root, max_files=2)
    with pytest.raises(ParcelError, match="too long"):
        unpack(stream_of((LINK, b"x", 1 << 20, b"a")), root)
    with pytest.raises(ParcelError, match="too long"):
        unpack(stream_of(file_named(b"a" * 5000)), root)
    assert sorted(os.listdir(root)) == ["a", "b"]


def test_a_stream_without_its_end_and_one_that_goes_on_behind_it_are_refused(root):
    with pytest.raises(ParcelError, match="in part only"):
        unpack(stream_of(file_named(b"a")), root)
    with pytest.raises(ParcelError, match="more than was announced"):
        unpack(stream_of(END, file_named(b"b")), root)
    with pytest.raises(ParcelError, match="damaged"):
        unpack(stream_of((NOTES, b"", 1, b"x")), root)


def listed(*pieces):
    whole = b"".join(
        environment.LISTED.pack(
            hashlib.sha256(data).digest(), len(data) | (1 << 31 if packed else 0)
        )
        for data, packed in pieces
    )
    return whole, hashlib.sha256(whole).hexdigest()


def test_a_piece_that_grows_beyond_its_size_is_refused():
    bomb = zlib.compress(bytes(PIECE_BYTES * 100), 9)
    (piece,) = environment.read_list(*listed((bomb, True)))
    assert piece.check(bomb)
    with pytest.raises(ParcelError, match="larger than pieces are"):
        piece.content(bomb)
    (piece,) = environment.read_list(*listed((b"no zlib", True)))
    with pytest.raises(ParcelError, match="can't be decompressed"):
        piece.content(b"no zlib")


def test_a_list_that_is_not_the_one_of_the_name_is_refused():
    whole, sha = listed((b"a", False))
    with pytest.raises(ParcelError, match="damaged"):
        environment.read_list(whole[:-1] + b"\xff", sha)
    whole, sha = listed((bytes(PIECE_BYTES + 1), False))
    with pytest.raises(ParcelError, match="larger than pieces are"):
        environment.read_list(whole, sha)


def test_a_flipped_bit_of_a_kept_parcel_is_noticed(tmp_path):
    path = tmp_path / "p"
    sha, writer = packed(path, [(FILE, "a", os.urandom(PIECE_BYTES * 2))])
    data = bytearray(path.read_bytes())
    data[PIECE_BYTES + 5] ^= 1
    path.write_bytes(data)
    kept = ParcelFile(str(path), sha, writer.num_pieces)
    kept.piece(0)
    with pytest.raises(ParcelError, match="is damaged"):
        kept.piece(1)
    kept.close()
    path.write_bytes(data[:-10])
    with pytest.raises(ParcelError, match="damaged"):
        ParcelFile(str(path), sha, writer.num_pieces)


def test_a_name_of_very_many_folders_and_notes_nested_very_deep_are_no_crash(root):
    with pytest.raises(ParcelError, match="lies in too many folders"):
        unpack(stream_of(file_named(b"d/" * 2030 + b"f")), root)
    deep = b"[" * 200_000
    with pytest.raises(ParcelError, match="what is noted of the environment is damaged"):
        unpack(stream_of((NOTES, b"", len(deep), deep)), root)
