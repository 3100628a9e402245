"""Which files of a project are watched, and when one of them counts as saved."""

import os
import subprocess

import pytest

from torchmuster.multirun.cli import dev
from torchmuster.multirun.cli.dev import SavedFiles, list_files


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    for name in (
        "train.py",
        "lib/model.py",
        "conf/base.yaml",
        "runs/old.py",
        "notes.txt",
        "a.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1\n")
    (folder / "venv").mkdir()
    (folder / "venv" / "pyvenv.cfg").touch()
    (folder / "venv" / "module.py").touch()
    monkeypatch.setenv("MUSTER_HOME", str(folder / "home"))
    (folder / "home" / "runs" / "one").mkdir(parents=True)
    (folder / "home" / "runs" / "one" / "copy.py").touch()
    return folder


def names(project):
    return sorted(os.path.relpath(path, project) for path in list_files([str(project)]))


def git(project, *words):
    subprocess.run(["git", "-C", str(project), *words], check=True, capture_output=True)


def saved(project, watch):
    return sorted(os.path.relpath(path, project) for path in watch.look())


def test_code_and_settings_are_watched_and_what_runs_write_is_not(project):
    assert names(project) == ["conf/base.yaml", "lib/model.py", "train.py"]


def test_in_a_work_tree_what_git_tracks_is_watched_and_new_code_that_it_does_not_ignore(project):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("venv\nhome\nignored.py\n")
    (project / "ignored.py").touch()
    git(project, "add", "runs/old.py", "conf/base.yaml")
    (project / "written.yaml").touch()  # perhaps by a run

    assert names(project) == ["conf/base.yaml", "lib/model.py", "runs/old.py", "train.py"]
    assert list_files([str(project / "lib")]) == list_files([str(project)])


@pytest.mark.parametrize("replaces", [False, True], ids=["written", "renamed"])
def test_a_file_is_saved_by_writing_it_and_by_putting_another_in_its_place(project, replaces):
    watch = SavedFiles([str(project)])
    assert watch.look() == ()
    if replaces:
        (project / "other").write_text("1\n")
        os.replace(project / "other", project / "train.py")
    else:
        os.utime(project / "train.py", ns=(1, 1))

    assert saved(project, watch) == ["train.py"]
    assert watch.look() == ()


def test_a_file_that_is_new_counts_and_one_that_is_removed_does_not(project, monkeypatch):
    monkeypatch.setattr(dev, "_LIST_AGAIN_S", 0.0)
    watch = SavedFiles([str(project)])

    (project / "lib" / "new.py").write_text("")
    assert saved(project, watch) == ["lib/new.py"]
    (project / "lib" / "new.py").unlink()
    assert watch.look() == ()
    (project / "lib" / "new.py").write_text("")
    assert saved(project, watch) == ["lib/new.py"]


def test_files_that_are_saved_together_are_one_change(project, monkeypatch):
    watch = SavedFiles([str(project)])

    def another(seconds):
        os.utime(project / "lib" / "model.py", ns=(1, 1))

    monkeypatch.setattr(dev, "pause", another)
    os.utime(project / "train.py", ns=(1, 1))

    assert saved(project, watch) == ["lib/model.py", "train.py"]


def test_of_a_very_large_project_the_folders_alone_are_watched(project, monkeypatch):
    git(project, "init", "-q")
    monkeypatch.setattr(dev, "_MOST_FILES", 2)

    assert list_files([str(project / "lib")]) == [str(project / "lib" / "model.py")]
