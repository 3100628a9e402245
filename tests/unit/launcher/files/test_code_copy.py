"""The code folder on its way to hosts: what goes, what stays, and what must never land."""

import io
import os
import subprocess
import tarfile

import pytest

from kit import values
from torchmuster.core.model.plan import ScriptKind
from torchmuster.errors import UsageError
from torchmuster.launcher.files import code_copy


def program(cwd, target="train.py", kind=ScriptKind.FILE):
    return values.program(target, kind=kind, cwd=str(cwd))


def archive_of(root, names):
    target = io.BytesIO()
    code_copy.write_archive(str(root), names, target)
    target.seek(0)
    return target


def tar_with(name, data=b"", **fields):
    """Return an archive with one entry."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        archive.addfile(info, io.BytesIO(data))
    target.seek(0)
    return target


def make(root, *names, text="1"):
    """Make files with this text below a folder."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_git_ignores_stays_here(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True, timeout=20)
    (tmp_path / ".gitignore").write_text("data/\n")
    make(tmp_path, "data/big", "sub dir/new.py")
    found = code_copy.find_code(str(tmp_path / "sub dir"))
    assert found.root == str(tmp_path)
    assert found.names == (".gitignore", "sub dir/new.py")
    assert found.by_git


def test_without_git_environments_and_caches_stay_here(tmp_path):
    make(tmp_path, "venv/pyvenv.cfg", "venv/lib.py", "__pycache__/a.pyc", "pkg/a.py", "t.py")
    found = code_copy.find_code(str(tmp_path))
    assert found.names == ("pkg/a.py", "t.py")
    assert not found.by_git


def test_folder_that_is_too_large_names_its_largest_entries(tmp_path):
    make(tmp_path, "data/big", "t.py")
    os.truncate(tmp_path / "data/big", 600 << 20)
    with pytest.raises(UsageError) as caught:
        code_copy.find_code(str(tmp_path))
    assert caught.value.why.startswith("data: 600 MiB")
    assert ".gitignore" in caught.value.fix


def test_files_links_and_modes_arrive(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    make(source, "x y/run.sh", text="echo")
    (source / "x y" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("x y/run.sh")
    (tmp_path / "outside").write_text("far")
    (source / "away").symlink_to(tmp_path / "outside")
    os.link(source / "x y" / "run.sh", source / "twin")
    names = code_copy.find_code(str(source)).names
    target.mkdir()
    count = code_copy.read_archive(archive_of(source, names), str(target), 1 << 20)
    assert count == 4
    assert os.readlink(target / "link") == "x y/run.sh"
    assert (target / "away").read_text() == "far"
    assert not (target / "away").is_symlink()
    assert (target / "twin").read_text() == "echo"
    assert os.access(target / "x y" / "run.sh", os.X_OK)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        *(
            ({"name": name, "data": b"x"}, "leaves its folder")
            for name in ("/etc/x", "../x", "a/../../x")
        ),
        *(
            ({"name": "link", "type": tarfile.SYMTYPE, "linkname": to}, "leaves its folder")
            for to in ("/etc", "../..", "a/../../..")
        ),
        ({"name": "disk", "type": tarfile.BLKTYPE}, "is not a file"),
        ({"name": "large", "data": b"x" * 11}, "more than 10 bytes"),
    ],
)
def test_archive_with_what_must_never_land_is_refused(tmp_path, entry, why):
    with pytest.raises(ValueError, match=why):
        code_copy.read_archive(tar_with(**entry), str(tmp_path), 10)


def test_cut_archive_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(os.urandom(10_000))
    data = archive_of(tmp_path, ["a"]).getvalue()[:5000]
    with pytest.raises(ValueError, match="damaged"):
        code_copy.read_archive(io.BytesIO(data), str(tmp_path), 1 << 20)


def test_program_moves_with_its_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    moved = code_copy.moved(program(tmp_path / "sub"), str(tmp_path), "/there/code")
    assert (moved.cwd, moved.target) == ("/there/code/sub", "train.py")


def test_absolute_script_moves_with_its_folder(tmp_path):
    whole = program(tmp_path, str(tmp_path / "sub" / "train.py"))
    moved = code_copy.moved(whole, str(tmp_path), "/there/code")
    assert (moved.cwd, moved.target) == ("/there/code", "/there/code/sub/train.py")


def test_script_outside_of_the_folder_is_refused(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    make(tmp_path, "train.py")
    with pytest.raises(UsageError, match="not in the folder"):
        code_copy.check_inside(program(inside, "../train.py"), str(inside))


def test_same_file_has_the_same_identity_and_a_changed_one_not(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("1")
    before = code_copy.identity(str(path))
    assert code_copy.identity(str(path)) == before
    path.write_text("2")
    os.utime(path, ns=(before["mtime_ns"], before["mtime_ns"]))
    assert code_copy.identity(str(path)) != before
    assert code_copy.identity(str(tmp_path / "none")) is None


def test_only_new_and_changed_files_come_back_the_smallest_first(tmp_path):
    make(tmp_path, "same", "changed")
    before = code_copy.stamps(str(tmp_path))
    (tmp_path / "changed").write_text("22")
    (tmp_path / "new").write_text("333")
    (tmp_path / "large").write_text("4" * 100)
    come, stay = code_copy.outputs(str(tmp_path), before, 50)
    assert (come, stay) == (["changed", "new"], ["large"])


@pytest.mark.parametrize("home", ["own home", "."])
def test_muster_home_inside_of_the_code_folder_stays_here(tmp_path, monkeypatch, home):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / home))
    make(tmp_path / home, "runs/r/secret", "cache/x", "credentials.toml")
    make(tmp_path, "own home of another/a.py", "train.py")
    found = code_copy.find_code(str(tmp_path)).names
    assert found == ("own home of another/a.py", "train.py")
