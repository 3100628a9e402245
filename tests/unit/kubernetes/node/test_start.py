"""The first program of a pod, run as an image runs it: what it makes of odd users and disks, and the words it leaves with."""

import json
import os
import runpy
import shutil
import sys

import pytest

from kit.command import ran
from torchmuster.core import proc

START = os.path.join(proc.PACKAGE_FOLDER, "kubernetes", "node", "start.py")
FINAL = 113


def started(tmp_path, before="", **environment):
    """Run `start.py` to its end with a message file of the test's own; return what it said and left."""
    message = tmp_path / "message"
    message.touch()
    folder = tmp_path / "muster"
    folder.mkdir(exist_ok=True)
    shutil.copy(START, folder / "start.py")
    program = (
        f"import os, sys\nsource = open({str(folder / 'start.py')!r}).read()\n"
        f"source = source.replace('/dev/termination-log', {str(message)!r})\n{before}\n"
        f"exec(compile(source, {str(folder / 'start.py')!r}, 'exec'),"
        f" {{'__name__': '__main__', '__file__': {str(folder / 'start.py')!r}}})\n"
    )
    done = ran(
        [sys.executable, "-I", "-S", "-c", program],
        limit_s=60,
        env={"PATH": os.environ["PATH"], "MUSTER_POD_DISK": str(tmp_path / "disk"), **environment},
    )
    left = message.read_text()
    return done, json.loads(left) if left else {}


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def test_a_python_that_is_too_old_is_named_where_people_and_clients_look(tmp_path, disk):
    before = "sys.version_info, sys.version = (3, 9, 2), '3.9.2 (main)'"
    done, left = started(tmp_path, before)
    assert done.returncode == FINAL
    assert left["error"] == "the image's Python is too old for muster"
    assert left["because"] == f"{sys.executable} is 3.9.2"
    assert "Python 3.11 or later" in left["hint"]
    heads = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert heads == ["error", "at", "because", "hint"]


def test_a_disk_of_another_user_is_said_with_the_key_that_helps(tmp_path):
    """It may belong to another user, or not be there: neither can be written."""
    done, left = started(tmp_path)
    assert done.returncode == FINAL
    assert left["error"] == "the pod can't write to its own disk"
    assert left["because"].endswith(f"belongs to another user than {os.getuid()}")
    assert left["hint"] == "`run_as` of the site sets the user"


def test_a_package_that_did_not_come_is_said_with_what_the_image_needs(tmp_path, disk):
    done, left = started(tmp_path)
    assert done.returncode == FINAL
    assert left["error"] == "torchmuster can't be put on the pod's disk"
    assert "package.txz" in left["because"]


@pytest.mark.parametrize("home", ["", "/", "/proc"])
def test_a_user_without_a_home_gets_the_pods_own_disk(monkeypatch, disk, home):
    """A random uid has none, and that of root may be on a root that is read-only."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("MUSTER_POD_DISK", str(disk))
    made = runpy.run_path(START)
    monkeypatch.setattr(os, "access", lambda path, mode: path not in ("/proc", "/tmp"))
    monkeypatch.setenv("TMPDIR", "to be set")
    made["writable_home"]()
    assert os.environ["HOME"] == str(disk)
    assert os.environ["TMPDIR"] == str(disk / "tmp")
    assert os.path.isdir(disk / "tmp")


def test_a_home_and_a_tmp_that_can_be_written_stay(monkeypatch, disk, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MUSTER_POD_DISK", str(disk))
    monkeypatch.delenv("TMPDIR", raising=False)
    runpy.run_path(START)["writable_home"]()
    assert os.environ["HOME"] == str(tmp_path)
    assert "TMPDIR" not in os.environ
