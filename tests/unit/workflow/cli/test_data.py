import json

import pytest

from kit.command import call
from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.cli.data import data


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").write_bytes(b"a")
    monkeypatch.chdir(tmp_path)
    return lambda *words, stdin=None: call(data, *words, stdin=stdin).stdout


def test_files_go_there_and_back_and_away(run, tmp_path):
    assert run("upload", "folder", "up") == "1 files uploaded, 1 B\n"
    assert run("upload", "folder", "up") == "1 files uploaded, 1 B, 1 were there already\n"
    assert json.loads(run("list", "up", "--json")) == [{"name": "a", "size_bytes": 1}]
    assert run("download", "up", "back") == "1 files downloaded, 1 B\n"
    assert run("check", "up", "--access-type", "delete") == "DELETE works: up\n"
    assert run("delete", "up", "--yes") == "1 files removed\n"
    assert run("list", "up") == ""
    assert (tmp_path / "back/a").read_bytes() == b"a"


def test_a_place_that_cannot_be_read_fails_the_check(run):
    with pytest.raises(MusterError, match="no such file"):
        run("check", "nowhere")


def test_arguments_in_the_wrong_order_are_noticed(run):
    with pytest.raises(UsageError) as caught:
        run("upload", "s3://b/x", "folder")
    assert "muster data upload folder s3://b/x" in caught.value.fix
