"""The version of the code that a run was started with, from real repositories."""

import os
import sys

import pytest

from kit.command import ran
from kit.values import program
from kit.waiting import wait_until
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.plan import ScriptKind
from torchmuster.launcher.owner import origin


def git(folder, *words):
    names = ["-c", "user.email=x@y", "-c", "user.name=x"]
    return ran(["git", *names, "-C", folder, *words], check=True).stdout


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "train.py").write_text("one\ntwo\n")
    (folder / "prod.env").write_text("PASSWORD=old\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "First")
    return folder


def test_what_is_installed_is_read_from_the_names_of_folders(tmp_path):
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    known = ("numpy-2.4.6.dist-info", "Typing_Extensions-4.1.dist-info", "old-1.0-py3.11.egg-info")
    for name in (*known, "numpy"):
        (site / name).mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("")
    python.chmod(0o755)
    installed = ("numpy==2.4.6", "old==1.0", "typing-extensions==4.1")
    assert origin.installed_for(str(python)) == installed
    assert origin.installed_for(str(tmp_path / "elsewhere" / "python")) == ()
    assert any(one.startswith("pytest==") for one in origin.installed_for(sys.executable))


def test_a_clean_tree_is_its_commit(repository):
    code, why = origin.find_code_version(str(repository))

    head = git(repository, "rev-parse", "HEAD").strip()
    assert (code.commit, code.branch, why) == (head, "trunk", "")
    assert (code.num_changed, code.num_untracked, code.difference) == (0, 0, "")


def test_a_changed_tree_is_its_commit_and_the_difference(repository):
    (repository / "train.py").write_text("one\nthree\nkey = 'x'\napi_key = 'abcdef123'\n")
    (repository / "new.txt").write_text("content that is not kept\n")
    (repository / "prod.env").write_text("PASSWORD=new\n")

    code, _ = origin.find_code_version(str(repository))

    assert (code.num_changed, code.num_untracked) != (0, 0)
    assert (code.changed, code.untracked) == (("prod.env", "train.py"), ("new.txt",))
    assert "-two\n+three\n+key = 'x'\n+api_key = '<hidden>'" in code.difference
    assert "PASSWORD" not in code.difference
    assert "content that" not in code.difference


def test_the_whole_tree_counts_for_a_script_in_a_folder_of_it(repository):
    (repository / "sub").mkdir()
    (repository / "train.py").write_text("changed\n")
    (repository / "prod.env").write_text("PASSWORD=new\n")

    code, _ = origin.find_code_version(str(repository / "sub"))

    assert (code.root, code.changed) == (str(repository), ("prod.env", "train.py"))
    assert "+changed" in code.difference
    assert "PASSWORD" not in code.difference


def test_a_large_difference_is_cut_and_a_huge_one_left_out(repository):
    long = "".join(f"{'y' * 60}{n}\n" for n in range(9000))
    (repository / "train.py").write_text("x" * 50 + f"\n{long}")
    code, _ = origin.find_code_version(str(repository))
    assert len(code.difference.encode()) <= origin.MAX_DIFFERENCE_BYTES
    assert code.left_out == "it is cut after 256 KiB"

    (repository / "train.py").write_text("y\n" * 30_000)
    code, _ = origin.find_code_version(str(repository))
    assert code.difference == ""
    assert "30002 lines differ" in code.left_out


def test_a_new_repository_has_no_commit(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("a")
    git(tmp_path, "add", ".")

    code, _ = origin.find_code_version(str(tmp_path))

    assert (code.commit, code.changed) == ("", ("a.py",))
    assert code.left_out == "nothing was ever committed"


def test_outside_a_repository_the_reason_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    assert origin.find_code_version(str(tmp_path)) == (None, "the script is in no git work tree")


def test_without_git_the_reason_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    code, why = origin.find_code_version(str(tmp_path))

    assert code is None
    assert why.startswith("git can't be asked")


def test_a_repository_cannot_have_commands_run(repository, tmp_path):
    trap = tmp_path / "trap"
    (repository / ".gitattributes").write_text("*.py diff=trap\n")
    for key in ("diff.trap.textconv", "diff.trap.command", "diff.external", "core.fsmonitor"):
        git(repository, "config", key, f"touch {trap}; cat")
    (repository / "train.py").write_text("other\n")

    code, _ = origin.find_code_version(str(repository))

    assert "+other" in code.difference
    assert not trap.exists()


@pytest.mark.parametrize(
    ("kind", "target", "folder"),
    [
        (ScriptKind.FILE, "code/train.py", "/home/u/code"),
        (ScriptKind.FILE, "/x/train.py", "/x"),
        (ScriptKind.FILE, "train.py", "/home/u"),
        (ScriptKind.MODULE, "a.b", "/home/u"),
    ],
)
def test_the_version_is_that_of_the_scripts_folder(kind, target, folder):
    assert origin.folder_of(program(target, kind=kind, cwd="/home/u")) == folder


def test_the_note_is_written_beside_the_start(repository, run_dir):
    origin.note_origin(run_dir, program(str(repository / "train.py")))

    wait_until(lambda: os.path.exists(run_dir.origin), "origin.json", 20)
    noted = codec.from_plain(origin.Origin, atomic.read_json(run_dir.origin))
    assert noted.code.root == str(repository)
    assert noted.user
