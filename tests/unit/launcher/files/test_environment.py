"""A virtual environment as an archive."""

import fcntl
import json
import os
import subprocess
import sys

import pytest

from kit.command import ran
from torchmuster.errors import UsageError
from torchmuster.launcher.files import environment
from torchmuster.launcher.files.environment import ParcelFile, Unpacker, relocate


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


def site_of(prefix):
    (site,) = prefix.glob("lib/python3*/site-packages")
    return site


def test_what_names_its_own_place_names_the_new_one(prefix, cache, tmp_path):
    packed = environment.pack(str(prefix), cache)
    there = unpacked(packed, tmp_path / "there")
    assert (there / "env" / "bin" / "tool").read_text() == "#!/elsewhere/env/bin/python\n"
    assert os.access(there / "env" / "bin" / "tool", os.X_OK)
    assert str(prefix) not in (there / "env" / "pyvenv.cfg").read_text()


def test_the_interpreter_runs_at_its_new_place(prefix, cache, tmp_path):
    (site_of(prefix) / "mine.py").write_text("print('imported')\n")
    packed = environment.pack(str(prefix), cache)
    there = unpacked(packed, tmp_path / "there", str(tmp_path / "there"))
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


def test_files_that_are_links_to_a_cache_travel_themselves(prefix, cache, tmp_path):
    kept = tmp_path / "uv-cache.py"
    kept.write_text("x = 1\n")
    (site_of(prefix) / "linked.py").symlink_to(kept)
    packed = environment.pack(str(prefix), cache)
    there = unpacked(packed, tmp_path / "there")
    (linked,) = there.glob("env/lib/python3*/site-packages/linked.py")
    assert not linked.is_symlink()
    assert linked.read_text() == "x = 1\n"


def test_an_editable_install_travels_with_the_folder_that_it_names(prefix, cache, tmp_path):
    source = tmp_path / "project" / "src"
    (source / "package").mkdir(parents=True)
    (source / "package" / "__init__.py").write_text("x = 1\n")
    (site_of(prefix) / "__editable__.package.pth").write_text(f"{source}\n")
    finder = site_of(prefix) / "__editable___other_finder.py"
    finder.write_text(f"MAPPING = {{'package': '{source}/package'}}\n")
    there = unpacked(environment.pack(str(prefix), cache), tmp_path / "there")
    assert (there / "extra" / "0" / "package" / "__init__.py").exists()
    (pth,) = there.glob("env/lib/python3*/site-packages/*.pth")
    assert pth.read_text() == "/elsewhere/extra/0\n"
    (found,) = there.glob("env/lib/python3*/site-packages/*_finder.py")
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
    text = settings.read_text()
    settings.write_text(
        text.replace("include-system-site-packages = false", "include-system-site-packages = true")
    )
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
    python.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(UsageError) as refused:
        environment.pack(str(prefix), cache)
    assert (refused.value.where, refused.value.why) == (str(python), "broken")


def test_an_interpreter_of_the_user_s_own_travels_too(monkeypatch, prefix, cache, tmp_path):
    monkeypatch.setattr(environment, "_base_travels", lambda facts: True)
    packed = environment.pack(str(prefix), cache)
    there = unpacked(packed, tmp_path / "there", str(tmp_path / "there"))
    assert packed.needs.base == ""
    python = there / "env" / "bin" / "python"
    assert os.path.realpath(python).startswith(f"{there}/base/")
    done = ran([python, "-I", "-c", "import sys; print(sys.base_prefix)"])
    assert done.stdout.split() == [f"{there}/base"], done.stderr


@pytest.fixture
def conda(tmp_path, monkeypatch):
    """Make what conda makes, as far as it matters: its records, a text and a binary with the prefix, an interpreter in it."""
    monkeypatch.undo()  # its interpreter lies in the environment
    made = tmp_path / "conda" / "envs" / "train"
    (made / "bin").mkdir(parents=True)
    facts = {"prefix": str(made), "base": str(made), "python": [3, 11], "executable": "python3.11"}
    python = made / "bin" / "python3.11"
    python.write_text(f"#!/bin/sh\necho '{json.dumps({**facts, 'machine': 'x86_64'})}'\n")
    python.chmod(0o755)
    (made / "bin" / "python").symlink_to("python3.11")
    (made / "lib").mkdir()
    (made / "lib" / "settings.txt").write_text(f"prefix={made}\n")
    room = 255
    string = os.fsencode(made) + b"/lib"
    (made / "lib" / "library.so").write_bytes(
        b"\x7fELF\0" + string + bytes(room - len(os.fsencode(made))) + b"\0after"
    )
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
    there = unpacked(
        packed, tmp_path / "there", "/scratch/muster-environments-1000/0123456789abcdef"
    )
    place = b"/scratch/muster-environments-1000/0123456789abcdef/env"
    assert (there / "env/lib/settings.txt").read_bytes() == b"prefix=" + place + b"\n"
    library = (there / "env/lib/library.so").read_bytes()
    assert len(library) == (conda / "lib/library.so").stat().st_size
    assert library.startswith(b"\x7fELF\0" + place + b"/lib\0\0")
    assert library.endswith(b"\0after")
    assert os.readlink(there / "env/bin/python") == "python3.11"
    assert sorted(os.listdir(there / "env")) == ["bin", "conda-meta", "lib"]
