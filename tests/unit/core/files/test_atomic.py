import os

import pytest

from torchmuster.core.files.atomic import read_json, write_json


def test_what_was_written_is_read(tmp_path):
    path = str(tmp_path / "a.json")
    write_json(path, {"a": [1, None, "ü"]})

    assert read_json(path) == {"a": [1, None, "ü"]}


def test_the_mode_is_as_asked(tmp_path):
    path = str(tmp_path / "a.json")
    write_json(path, 1, mode=0o600)

    assert os.stat(path).st_mode & 0o777 == 0o600


def test_on_a_full_disk_the_old_file_stays(tmp_path, monkeypatch):
    path = str(tmp_path / "a.json")
    write_json(path, "old")
    monkeypatch.setattr(os, "urandom", bytes)
    os.symlink("/dev/full", f"{path}.{os.getpid()}-00000000.tmp")

    with pytest.raises(OSError, match="No space left"):
        write_json(path, "new")
    assert read_json(path) == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_is_no_json_leaves_the_old_file(tmp_path):
    path = str(tmp_path / "a.json")
    write_json(path, "old")

    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_folder_in_the_way_is_an_error_that_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.json").mkdir()

    with pytest.raises(IsADirectoryError):
        write_json(str(tmp_path / "a.json"), "new")
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff"])
def test_half_a_file_is_no_file(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)

    assert read_json(str(path)) is None


def test_a_missing_file_is_no_file(tmp_path):
    assert read_json(str(tmp_path / "a.json")) is None
