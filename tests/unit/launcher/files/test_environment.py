"""A virtual environment as an archive: packed, unpacked, and at home in its new place."""

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib

import pytest

from kit.command import ran
from kit.programs import shell_program
from torchmuster.errors import UsageError
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
    conda_records,
    in_binary,
    relocate,
)


@pytest.fixture
def prefix(tmp_path):
    made = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    (made / "bin" / "tool").write_text(f"#!{made}/bin/python\n")
    (made / "bin" / "tool").chmod(0o755)
    return made


@pytest.fixture(autouse=True)
def base_of_the_system(monkeypatch):
    """Leave the interpreter below where it is: it is large."""
    monkeypatch.setattr(environment, "_base_travels", lambda facts: False)


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def unpacked(packed, folder, place="/elsewhere"):
    folder.mkdir()
    needs = packed.needs
    kept = ParcelFile(packed.path, needs.sha, needs.num_pieces)
    unpacker = Unpacker(str(folder), needs.unpacked_bytes, needs.num_files)
    for index, piece in enumerate(kept.pieces):
        unpacker.feed(piece.content(kept.piece(index)))
    kept.close()
    relocate(str(folder), place, unpacker.finish())
    return folder


@pytest.fixture
def sent(prefix, cache, tmp_path):
    """Return a function that packs the environment, and unpacks it where it is said to lie elsewhere, or to be used."""

    def send(is_used=False):
        there = tmp_path / "there"
        packed = environment.pack(str(prefix), cache)
        return unpacked(packed, there, str(there) if is_used else "/elsewhere")

    return send


def site_of(prefix):
    (site,) = prefix.glob("lib/python3*/site-packages")
    return site


def test_what_names_its_own_place_names_the_new_one(prefix, sent):
    there = sent()
    assert (there / "env" / "bin" / "tool").read_text() == "#!/elsewhere/env/bin/python\n"
    assert os.access(there / "env" / "bin" / "tool", os.X_OK)
    assert str(prefix) not in (there / "env" / "pyvenv.cfg").read_text()


def test_the_interpreter_runs_at_its_new_place(prefix, sent):
    (site_of(prefix) / "mine.py").write_text("print('imported')\n")
    there = sent(is_used=True)
    python = there / "env" / "bin" / "python"
    done = ran([python, "-c", "import sys, mine; print(sys.prefix)"])
    assert done.stdout.split() == ["imported", str(there / "env")], done.stderr


def test_the_same_files_are_packed_once(prefix, cache):
    first = environment.pack(str(prefix), cache)
    inode = os.stat(first.path).st_ino
    again = environment.pack(str(prefix), cache)
    assert (again.needs, os.stat(again.path).st_ino) == (first.needs, inode)
    (site_of(prefix) / "more.py").write_text("x = 1\n")
    assert environment.pack(str(prefix), cache).needs.sha != first.needs.sha


def test_archives_do_not_pile_up(prefix, cache):
    for number in range(5):
        (site_of(prefix) / "more.py").write_text("x = 1\n" * number)
        newest = environment.pack(str(prefix), cache)
    names = os.listdir(cache)
    assert len([name for name in names if name.endswith(".parcel")]) == 3
    assert len([name for name in names if name.endswith(".json")]) == 3
    assert os.path.basename(newest.path) in names


def test_files_that_are_links_to_a_cache_travel_themselves(prefix, sent, tmp_path):
    kept = tmp_path / "uv-cache.py"
    kept.write_text("x = 1\n")
    (site_of(prefix) / "linked.py").symlink_to(kept)
    linked = site_of(sent() / "env") / "linked.py"
    assert not linked.is_symlink()
    assert linked.read_text() == "x = 1\n"


def test_an_editable_install_travels_with_the_folder_that_it_names(prefix, sent, tmp_path):
    source = tmp_path / "project" / "src"
    (source / "package").mkdir(parents=True)
    (source / "package" / "__init__.py").write_text("x = 1\n")
    (site_of(prefix) / "__editable__.package.pth").write_text(f"{source}\n")
    finder = site_of(prefix) / "__editable___other_finder.py"
    finder.write_text(f"MAPPING = {{'package': '{source}/package'}}\n")
    there = sent()
    assert (there / "extra" / "0" / "package" / "__init__.py").exists()
    (pth,) = site_of(there / "env").glob("*.pth")
    assert pth.read_text() == "/elsewhere/extra/0\n"
    (found,) = site_of(there / "env").glob("*_finder.py")
    assert found.read_text() == "MAPPING = {'package': '/elsewhere/extra/0/package'}\n"


def test_what_the_libraries_need_of_the_system_is_read_in_them(prefix, cache):
    (site_of(prefix) / "library.so").write_bytes(b"\x7fELF..GLIBC_2.5\0GLIBC_2.999\0")
    assert environment.pack(str(prefix), cache).needs.glibc == 999


def test_a_folder_that_is_no_environment_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no virtual environment"):
        environment.find_prefix(str(tmp_path), {})
    (tmp_path / "conda-meta").mkdir()
    assert environment.find_prefix(str(tmp_path), {}) == str(tmp_path)


def test_the_active_environment_is_meant_where_none_is_named(prefix, tmp_path):
    assert environment.find_prefix("", {"VIRTUAL_ENV": str(prefix)}) == str(prefix)
    (tmp_path / "conda-meta").mkdir()
    assert environment.find_prefix("", {"CONDA_PREFIX": str(tmp_path)}) == str(tmp_path)


def test_packages_of_the_system_are_said_to_stay_here(prefix, cache):
    settings = prefix / "pyvenv.cfg"
    settings.write_text(settings.read_text().replace("packages = false", "packages = true"))
    said = []
    environment.pack(str(prefix), cache, said.append)
    assert any("--system-site-packages" in sentence for sentence in said)


def test_what_a_killed_packer_has_left_is_removed_and_what_another_writes_is_not(prefix, cache):
    os.makedirs(cache)
    left, written = (os.path.join(cache, f".environment-{name}") for name in ("left", "written"))
    for path in (left, written):
        with open(path, "w") as file:
            file.write("half")
    with open(written) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        environment.pack(str(prefix), cache)
        assert os.path.exists(written)
    assert not os.path.exists(left)


def test_a_broken_interpreter_is_named(prefix, cache):
    python = prefix / "bin" / "python"
    python.unlink()
    shell_program(python, "echo broken >&2; exit 1")
    with pytest.raises(UsageError) as refused:
        environment.pack(str(prefix), cache)
    assert (refused.value.where, refused.value.why) == (str(python), "broken")


def test_an_interpreter_of_the_user_s_own_travels_too(monkeypatch, prefix, cache, sent):
    monkeypatch.setattr(environment, "_base_travels", lambda facts: True)
    there = sent(is_used=True)
    assert environment.pack(str(prefix), cache).needs.base == ""
    python = there / "env" / "bin" / "python"
    assert os.path.realpath(python).startswith(f"{there}/base/")
    done = ran([python, "-I", "-c", "import sys; print(sys.base_prefix)"])
    assert done.stdout.split() == [f"{there}/base"], done.stderr


@pytest.fixture
def conda(tmp_path, monkeypatch):
    """Make what conda makes, as far as it matters: its records, a text and a binary with the prefix, an interpreter in it."""
    monkeypatch.undo()  # its interpreter lies in the environment
    made = tmp_path / "conda" / "envs" / "train"
    facts = {"prefix": str(made), "base": str(made), "python": [3, 11], "executable": "python3.11"}
    told = json.dumps({**facts, "machine": "x86_64"})
    shell_program(made / "bin" / "python3.11", f"echo '{told}'")
    (made / "bin" / "python").symlink_to("python3.11")
    (made / "lib").mkdir()
    (made / "lib" / "settings.txt").write_text(f"prefix={made}\n")
    room = 255
    place = os.fsencode(made)
    string = place + b"/lib" + bytes(room - len(place))
    (made / "lib" / "library.so").write_bytes(b"\x7fELF\0" + string + b"\0after")
    paths = [
        {"_path": "lib/settings.txt", "prefix_placeholder": "p" * room, "file_mode": "text"},
        {"_path": "lib/library.so", "prefix_placeholder": "p" * room, "file_mode": "binary"},
        {"_path": "bin/python3.11"},
    ]
    meta = made / "conda-meta"
    meta.mkdir()
    (meta / "x-1-0.json").write_text(json.dumps({"paths_data": {"paths": paths}}))
    for name in ("pkgs", "envs"):  # as conda's own environment has them
        (made / name).mkdir()
        (made / name / "large").write_text("x")
    return made


def test_an_environment_of_conda_travels_with_its_interpreter_and_its_prefixes(
    conda, cache, tmp_path
):
    packed = environment.pack(str(conda), cache)
    assert packed.needs.base == ""
    there = unpacked(packed, tmp_path / "there", PLACE.decode().removesuffix("/env"))
    assert (there / "env/lib/settings.txt").read_bytes() == b"prefix=" + PLACE + b"\n"
    library = (there / "env/lib/library.so").read_bytes()
    assert len(library) == (conda / "lib/library.so").stat().st_size
    assert library.startswith(b"\x7fELF\0" + PLACE + b"/lib\0\0")
    assert library.endswith(b"\0after")
    assert os.readlink(there / "env/bin/python") == "python3.11"
    assert sorted(os.listdir(there / "env")) == ["bin", "conda-meta", "lib"]


# A parcel: what goes in comes out, and what is damaged or hostile does not.


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def packed(path, entries, notes=None):
    with open(path, "wb") as file, contextlib.closing(ParcelWriter(file)) as writer:
        for kind, name, content in entries:
            writer.add(kind, name, content)
        return writer.finish(notes or {}), writer


def stream_of(*entries):
    """Return a stream that no writer of ours makes."""
    found = b""
    for kind, name, size, content in entries:
        found += struct.pack(">cHQ", kind, len(name), size) + name + content
    return found


def file_named(name, content=b"x"):
    return (FILE, name, len(content), content)


def unpack(stream, root):
    with contextlib.closing(Unpacker(str(root), 1 << 40, 100)) as unpacker:
        unpacker.feed(stream)
        return unpacker.finish()


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
    assert not (root / "env/large").stat().st_mode & 1
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


DEEP = b"[" * 200_000
LEAVES = "leaves its folder"
REFUSED = {
    "a file that is a folder, too": ([file_named(b"b"), file_named(b"b/c")], "file and a folder"),
    "a name of very many folders": ([file_named(b"d/" * 2030 + b"f")], "lies in too many folders"),
    "a name that is too long": ([file_named(b"x" * 5000)], "too long"),
    "a link to a name that is too long": ([(LINK, b"x", 1 << 20, b"a")], "too long"),
    "more bytes than announced": ([(FILE, b"x", 1 << 60, b"x")], "more than was announced"),
    "more files than announced": ([file_named(b"a/%d" % n) for n in range(101)], "more than was"),
    "no end": ([file_named(b"a")], "in part only"),
    "more behind its end": ([END, file_named(b"x")], "more than was announced"),
    "notes that are none": ([(NOTES, b"", 1, b"x")], "damaged"),
    "notes nested very deep": ([(NOTES, b"", len(DEEP), DEEP)], "is noted of .* is damaged"),
    **{
        f"the name {name}": ([file_named(name), END], LEAVES)
        for name in (b"../x", b"/etc/x", b"a/../../x", b"a//x", b"./x", b"", b"a/", b"x\0y")
    },
    **{
        f"the link {name} to {target}": (
            [(LINK, name, len(target), target), file_named(b"x"), END],
            LEAVES,
        )
        for name, target in (
            (b"x", b"/etc"),
            (b"x", b"../x"),
            (b"a/x", b"../../y"),
            (b"x", b"a/../../y"),  # behind another link that is one level more
            (b"x", b""),
            (b"x", b"y\0z"),
        )
    },
    **{
        f"the device, pipe or hard link {kind}": ([(kind, b"x", 0, b"")], "is not a file")
        for kind in (b"d", b"c", b"b", b"p", b"h", b"\0")
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_hostile_stream_is_refused_before_it_is_written(root, what):
    entries, why = REFUSED[what]
    with pytest.raises(ParcelError, match=why):
        unpack(stream_of(*entries), root)
    assert os.listdir(root.parent) == ["root"]
    assert "x" not in os.listdir(root)


def test_nothing_is_written_through_a_link(root):
    stream = stream_of((LINK, b"a", 1, b"b"), file_named(b"b/x"), file_named(b"a/y"), END)
    with pytest.raises(OSError, match="exists"):
        unpack(stream, root)


def test_a_file_that_comes_twice_is_refused(root):
    with pytest.raises(FileExistsError):
        unpack(stream_of(file_named(b"a"), file_named(b"a"), END), root)


def listed(*pieces):
    sums = [
        (hashlib.sha256(data).digest(), len(data) | is_packed << 31) for data, is_packed in pieces
    ]
    whole = b"".join(environment.LISTED.pack(*one) for one in sums)
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


# New places in what was unpacked, as conda writes them.
#
# How conda does it is read in conda's own code and in that of conda-pack: `conda/core/portability.py` (`binary_replace`: the new prefix in place of
# the old one, then the rest of the string up to its NUL, then as many NULs as it is shorter), and records `conda-meta/NAME.json` with
# `paths_data.paths[]`, of which those with `prefix_placeholder` hold the prefix, `file_mode` saying `text` or `binary`.


PLACEHOLDER = b"/opt/anaconda1anaconda2anaconda3" + b"/placehold" * 22 + b"abc"
INSTALLED = b"/home/me/conda/envs/train"
PLACE = b"/scratch/muster-environments-1000/0123456789abcdef/env"


def as_conda(data, old, new):
    """Install as conda does: of each string up to its NUL, what it gets shorter is filled behind it."""
    found = []
    for string in data.split(b"\0"):
        shorter = string.count(old) * (len(old) - len(new))
        found.append(string.replace(old, new) + b"\0" * shorter)
    return b"\0".join(found)


BUILT = (
    b"\x7fELF\0\0"
    + PLACEHOLDER
    + b"/lib/python3.11\0\0\0after\0"
    + (PLACEHOLDER + b"/lib:" + PLACEHOLDER + b"/lib64\0next\0")
    + b"$ORIGIN/../lib\0end"
)


ROOM = len(PLACEHOLDER)
INSTALLED_FILE = as_conda(BUILT, PLACEHOLDER, INSTALLED)


def in_place(data, place, room=ROOM):
    return in_binary(data, INSTALLED, place, room, "lib/x.so")


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(PLACE, id="a longer one fits into the room that conda has left"),
        pytest.param(b"/s/env", id="a shorter one is filled with NULs"),
    ],
)
def test_a_place_in_a_binary_is_as_conda_would_have_written_it(place):
    assert len(INSTALLED_FILE) == len(BUILT)
    assert in_place(INSTALLED_FILE, place) == as_conda(BUILT, PLACEHOLDER, place)


def test_a_place_that_is_longer_than_the_room_is_refused():
    with pytest.raises(ValueError, match=r"lib/x.so has room for 255"):
        in_place(INSTALLED_FILE, b"/" + b"x" * 255, 255)


def test_a_string_that_conda_has_not_written_is_not_touched():
    data = b"\x7fELF\0" + INSTALLED + b"/lib\0" + b"data\0"  # no NULs behind it
    with pytest.raises(ValueError, match="another string than conda"):
        in_place(data, PLACE)


def record(prefix, *entries):
    meta = prefix / "conda-meta"
    meta.mkdir(parents=True, exist_ok=True)
    name = f"package{len(os.listdir(meta))}-1.0-0.json"
    (meta / name).write_text(json.dumps({"paths_data": {"paths_version": 1, "paths": entries}}))


def entry(path, mode):
    held = {"prefix_placeholder": PLACEHOLDER.decode(), "file_mode": mode}
    return {"_path": path, "path_type": "hardlink", **held}


def test_conda_s_records_say_which_files_hold_the_prefix(tmp_path):
    plain = {"_path": "lib/plain.txt", "path_type": "hardlink", "sha256": "00"}
    record(tmp_path, entry("bin/tool", "text"), entry("lib/x.so", "binary"), plain)
    record(tmp_path, entry("share/settings", "text"))
    (tmp_path / "conda-meta" / "history").write_text("==> 2026 <==\n")
    (tmp_path / "conda-meta" / "broken.json").write_text("{")
    (tmp_path / "conda-meta" / "old.json").write_text("{}")
    texts, binaries = conda_records(str(tmp_path))
    assert texts == {"bin/tool", "share/settings"}
    assert binaries == {"lib/x.so": ROOM}


def noted(**given):
    usual = {"links": {}, "texts": [], "binaries": {}, "moves": {INSTALLED.decode(): "env"}}
    return {**usual, **given}


def test_texts_and_binaries_name_the_new_place(tmp_path):
    (tmp_path / "env").mkdir()
    text, binary = tmp_path / "env" / "tool", tmp_path / "env" / "x.so"
    text.write_bytes(b"#!" + INSTALLED + b"/bin/python\n" + INSTALLED + b"-other\n")
    text.chmod(0o700)
    binary.write_bytes(INSTALLED_FILE)
    place = PLACE.decode().removesuffix("/env")
    notes = noted(texts=["env/tool"], binaries={"env/x.so": ROOM})
    relocate(str(tmp_path), place, notes)
    assert text.read_bytes() == b"#!" + PLACE + b"/bin/python\n" + INSTALLED + b"-other\n"
    assert os.access(text, os.X_OK)
    assert binary.read_bytes() == as_conda(BUILT, PLACEHOLDER, PLACE)


@pytest.mark.parametrize("key", ["texts", "binaries", "links"])
def test_what_is_noted_of_files_outside_is_refused(tmp_path, key):
    for name in ("../x", "/etc/x", "a/../../x"):
        value = [name] if key == "texts" else {name: 1}
        with pytest.raises(ValueError, match="leaves its folder"):
            relocate(str(tmp_path), "/place", noted(**{key: value}))
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(outside)
    value = ["link/x"] if key == "texts" else {"link/x": 1}
    with pytest.raises(ValueError, match="through a link"):
        relocate(str(tmp_path / "root"), "/place", noted(**{key: value}))
