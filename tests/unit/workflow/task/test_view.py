import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.sandbox.place import PlacedFile
from torchmuster.workflow.task.view import RealPathFiles, clean_up


def file(path, content=b"ours"):
    return PlacedFile(path=str(path), content=content, mode=0o755)


@pytest.fixture
def claims(tmp_path):
    return str(tmp_path / "claims")


def test_files_and_their_directories_come_and_go(tmp_path, claims):
    place = RealPathFiles("a", claims)
    place.place([file(tmp_path / "new" / "deep" / "run.sh")])

    assert (tmp_path / "new" / "deep" / "run.sh").read_bytes() == b"ours"
    assert place.remove() == []
    assert os.listdir(tmp_path) == ["claims"]
    assert os.listdir(claims) == []


def test_what_was_there_before_is_refused_and_not_touched(tmp_path, claims):
    (tmp_path / "x").write_text("theirs")

    with pytest.raises(UsageError, match="exists already: it was there before"):
        RealPathFiles("a", claims).place([file(tmp_path / "y"), file(tmp_path / "x")])

    assert (tmp_path / "x").read_text() == "theirs"
    assert not (tmp_path / "y").exists()


def test_the_task_that_has_placed_a_file_is_named(tmp_path, claims):
    RealPathFiles("first", claims).place([file(tmp_path / "x")])

    with pytest.raises(UsageError, match="task `first` of this run has placed it"):
        RealPathFiles("second", claims).place([file(tmp_path / "x", b"other")])


def test_a_file_that_another_has_put_in_its_place_is_left_alone(tmp_path, claims):
    place = RealPathFiles("a", claims)
    place.place([file(tmp_path / "x")])
    (tmp_path / "theirs").write_text("theirs")
    os.replace(tmp_path / "theirs", tmp_path / "x")

    assert place.remove() == [str(tmp_path / "x")]
    assert (tmp_path / "x").read_text() == "theirs"


def test_a_directory_that_holds_something_by_now_is_left_alone(tmp_path, claims):
    place = RealPathFiles("a", claims)
    place.place([file(tmp_path / "new" / "x")])
    (tmp_path / "new" / "result").write_text("kept")

    assert place.remove() == [str(tmp_path / "new")]
    assert (tmp_path / "new" / "result").read_text() == "kept"


def killed_after_placing(path, claims, content="b'ours'"):
    code = (
        "import os, signal\n"
        "from torchmuster.workflow.sandbox.place import PlacedFile\n"
        "from torchmuster.workflow.task.view import RealPathFiles\n"
        f"one = PlacedFile(path={str(path)!r}, content={content})\n"
        f"RealPathFiles('dead', {claims!r}).place([one])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -9


def test_the_next_start_removes_what_a_killed_one_left(tmp_path, claims):
    killed_after_placing(tmp_path / "x", claims)
    assert (tmp_path / "x").exists()

    RealPathFiles("next", claims).place([file(tmp_path / "x", b"next")])

    assert (tmp_path / "x").read_bytes() == b"next"
    assert len(os.listdir(claims)) == 1


@pytest.mark.parametrize(("content", "left"), [(b"ours", False), (b"theirs", True)])
def test_a_record_without_inodes_removes_only_the_same_content(tmp_path, claims, content, left):
    killed_after_placing(tmp_path / "x", claims)
    (name,) = os.listdir(claims)
    record = Path(claims, name)
    claim = json.loads(record.read_text())
    claim["files"][0]["inode"] = None
    record.write_text(json.dumps(claim))
    (tmp_path / "x").write_bytes(content)

    clean_up(str(record))

    assert (tmp_path / "x").exists() == left


def test_what_can_not_be_created_leaves_nothing_behind(tmp_path, claims):
    with pytest.raises(MusterError, match="can't be created"):
        RealPathFiles("a", claims).place([file(tmp_path / "x"), file(tmp_path / ("n" * 300))])

    assert os.listdir(tmp_path) == ["claims"]
    assert os.listdir(claims) == []


def test_paths_that_can_not_be_are_refused_together(tmp_path, claims):
    with pytest.raises(UsageError) as caught:
        RealPathFiles("a", claims).place([*map(file, ["x", "/proc/y", "/none/a", "/none/a/b"])])

    assert caught.value.what == "3 files can't be placed"


def test_a_file_that_is_no_record_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[]")

    with pytest.raises(UsageError, match="not a claim record"):
        clean_up(str(tmp_path / "x.json"))
    assert clean_up(str(tmp_path / "none.json")) == []


def test_a_new_attempt_of_a_task_replaces_the_files_of_the_last(tmp_path, claims):
    RealPathFiles("a", claims).place([file(tmp_path / "x"), file(tmp_path / "y")])
    RealPathFiles("a", claims).place([file(tmp_path / "x", b"again")])

    assert (tmp_path / "x").read_bytes() == b"again"
    assert not (tmp_path / "y").exists()
