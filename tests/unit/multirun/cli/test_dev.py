"""`muster dev`: which files are watched, and what is done next; one run at a time, and the newest wish wins."""

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.tables import words
from torchmuster.multirun.cli import dev
from torchmuster.multirun.cli.dev import Act, DevLoop, SavedFiles, list_files, name_for, status_of


def test_a_save_during_a_run_cancels_it_and_the_new_code_starts():
    loop = DevLoop()
    loop.start()

    assert loop.saved() is Act.CANCEL
    assert loop.saved() is None  # it is being ended already
    assert loop.ended(143) is Act.START


def test_a_save_after_a_run_starts_the_next_at_once():
    loop = DevLoop()
    loop.start()

    assert loop.ended(0) is None
    assert loop.saved() is Act.START


@pytest.mark.parametrize("keys", ["\n", "\r", "r", "xr"])
def test_a_key_runs_again(keys):
    assert DevLoop().pressed(keys) is Act.START


def test_until_error_goes_on_until_a_run_fails_and_then_waits():
    loop = DevLoop(until_error=True)
    loop.start()

    assert loop.ended(0) is Act.START
    loop.start()
    assert loop.ended(1) is None
    assert loop.saved() is Act.START


def test_who_leaves_during_a_run_ends_it_first_and_no_later_save_keeps_him():
    loop = DevLoop(until_error=True)
    loop.start()

    assert loop.pressed("q") is Act.CANCEL
    assert loop.saved() is None
    assert loop.ended(0) is Act.QUIT


@given(st.lists(st.sampled_from(["saved", "r", "q", "x", "ended", "failed"]), max_size=30))
def test_no_run_begins_beside_another_and_every_wish_is_answered(wishes):
    loop = DevLoop()
    loop.start()
    runs, cancelled, leaves = 1, False, False
    for word in wishes:
        is_end = word in ("ended", "failed")
        if is_end and not runs:
            continue
        if is_end:
            act = loop.ended(0 if word == "ended" else 1)
            assert act is not None or not cancelled
            runs, cancelled = 0, False
        else:
            act = loop.saved() if word == "saved" else loop.pressed(word)
        leaves = leaves or word == "q"
        if act is Act.QUIT:
            assert leaves
            assert not runs
            return
        if act is Act.CANCEL:
            assert runs
            cancelled = True
        if act is Act.START:
            assert not runs
            assert not leaves
            loop.start()
            runs = 1


def test_the_line_below_says_what_was_saved_how_it_went_and_what_is_awaited():
    line = status_of(0, 0.42, ("train.py", "model.py"), "12:03:11", has_keys=False)
    assert line == "saved train.py and 1 more 12:03:11; ran 420 ms; waiting for a change"

    failed = "failed in 4 min 10 s (exit code 1); waiting for a change (Enter: again, q: quit)"
    assert status_of(1, 250.0, (), "", has_keys=True) == failed


def test_a_session_has_the_name_of_its_folder_unless_another_folder_has_taken_it():
    assert name_for("/home/ada/my project", {}) == "dev-my-project"
    assert name_for("/", {}) == "dev-root"
    assert name_for("/a/x", {"dev-x": "/a/x"}) == "dev-x"
    assert name_for("/b/x", {"dev-x": "/a/x", "main": "/b/x"}) == "dev-x-2"


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    monkeypatch.setenv("MUSTER_HOME", str(folder / "home"))
    ours = "train.py lib/model.py conf/base.yaml runs/old.py notes.txt a.json"
    for name in words(f"{ours} venv/pyvenv.cfg venv/module.py home/runs/one/copy.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1\n")
    return folder


def names(project, found):
    return sorted(os.path.relpath(path, project) for path in found)


def watched(project):
    return names(project, list_files([str(project)]))


def git(project, *argv):
    subprocess.run(["git", "-C", str(project), *argv], check=True, capture_output=True)


def test_code_and_settings_are_watched_and_what_runs_write_is_not(project):
    assert watched(project) == ["conf/base.yaml", "lib/model.py", "train.py"]


def test_in_a_work_tree_what_git_tracks_is_watched_and_new_code_that_it_does_not_ignore(project):
    git(project, "init", "-q")
    (project / ".gitignore").write_text("venv\nhome\nignored.py\n")
    (project / "ignored.py").touch()
    git(project, "add", "runs/old.py", "conf/base.yaml")
    (project / "written.yaml").touch()  # perhaps by a run

    assert watched(project) == ["conf/base.yaml", "lib/model.py", "runs/old.py", "train.py"]
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

    assert names(project, watch.look()) == ["train.py"]
    assert watch.look() == ()


def test_a_file_that_is_new_counts_and_one_that_is_removed_does_not(project, monkeypatch):
    monkeypatch.setattr(dev, "_LIST_AGAIN_S", 0.0)
    watch = SavedFiles([str(project)])

    (project / "lib" / "new.py").write_text("")
    assert names(project, watch.look()) == ["lib/new.py"]
    (project / "lib" / "new.py").unlink()
    assert watch.look() == ()
    (project / "lib" / "new.py").write_text("")
    assert names(project, watch.look()) == ["lib/new.py"]


def test_files_that_are_saved_together_are_one_change(project, monkeypatch):
    watch = SavedFiles([str(project)])

    def another(seconds):
        os.utime(project / "lib" / "model.py", ns=(1, 1))

    monkeypatch.setattr(dev, "pause", another)
    os.utime(project / "train.py", ns=(1, 1))

    assert names(project, watch.look()) == ["lib/model.py", "train.py"]


def test_of_a_very_large_project_the_folders_alone_are_watched(project, monkeypatch):
    git(project, "init", "-q")
    monkeypatch.setattr(dev, "_MOST_FILES", 2)

    assert list_files([str(project / "lib")]) == [str(project / "lib" / "model.py")]
