"""Which code a worker says that it has run."""

import hashlib
import importlib
import os
import sys

import pytest

from torchmuster.core.node.spawner import last_words as ran_code
from torchmuster.core.node.spawner.last_words import CodeNote


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project that is the current folder, of which rank 0 has imported `the_model_of_this_test`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "the_model_of_this_test.py").write_text("ANSWER = 1\n")
    importlib.import_module("the_model_of_this_test")
    yield tmp_path
    del sys.modules["the_model_of_this_test"]


def shown(note):
    return {file.path: (file.sha256, file.changed) for file in note.read().files}


def checksum(text):
    return hashlib.sha256(text).hexdigest()


def test_the_script_s_own_bytes_and_the_project_s_modules_are_told(project):
    note = CodeNote(str(project))
    note.take_script(str(project / "train.py"), b"import the_model_of_this_test\n")
    (project / "train.py").write_text("changed since\n")
    assert shown(note) == {
        "train.py": (checksum(b"import the_model_of_this_test\n"), False),
        "the_model_of_this_test.py": (checksum(b"ANSWER = 1\n"), False),
    }


def test_a_module_that_changed_while_the_worker_ran_is_marked(project):
    note = CodeNote(None)
    path = project / "the_model_of_this_test.py"
    path.write_text("ANSWER = 2\n")
    later = note._since + 10
    os.utime(path, (later, later))
    assert shown(note) == {path.name: (checksum(b"ANSWER = 2\n"), True)}


def test_their_number_is_bounded_and_the_rest_is_counted(project, monkeypatch):
    monkeypatch.setattr(ran_code, "_MOST_FILES", 1)
    note = CodeNote(None)
    note.take_script(str(project / "train.py"), b"")
    code = note.read()
    assert [file.path for file in code.files] == ["train.py"]
    assert code.num_left_out == 1


def test_installed_packages_and_other_ranks_are_no_business_of_it(project, monkeypatch):
    theirs = project / "env/lib/site-packages"
    theirs.mkdir(parents=True)
    (theirs / "an_installed_one.py").write_text("")
    monkeypatch.syspath_prepend(str(theirs))
    importlib.import_module("an_installed_one")
    assert list(shown(CodeNote(None))) == ["the_model_of_this_test.py"]
    del sys.modules["an_installed_one"]
    monkeypatch.setenv("RANK", "1")
    assert CodeNote(None).read() is None
