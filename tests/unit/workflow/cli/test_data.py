import json

import click
import pytest

from kit.command import call
from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.cli.data import data, dataset


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_DATASETS", str(tmp_path / "sets"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").write_bytes(b"a")
    monkeypatch.chdir(tmp_path)
    return lambda group, *words, stdin=None: call(group, *words, stdin=stdin).stdout


def test_files_go_there_and_back_and_away(run, tmp_path):
    assert run(data, "upload", "folder", "up") == "1 files uploaded, 1 B\n"
    assert run(data, "upload", "folder", "up") == "1 files uploaded, 1 B, 1 were there already\n"
    assert json.loads(run(data, "list", "up", "--json")) == [{"name": "a", "size_bytes": 1}]
    assert run(data, "download", "up", "back") == "1 files downloaded, 1 B\n"
    assert run(data, "check", "up", "--access-type", "delete") == "DELETE works: up\n"
    assert run(data, "delete", "up", "--yes") == "1 files removed\n"
    assert run(data, "list", "up") == ""
    assert (tmp_path / "back/a").read_bytes() == b"a"


def test_a_place_that_cannot_be_read_fails_the_check(run):
    with pytest.raises(MusterError, match="no such file"):
        run(data, "check", "nowhere")


def test_arguments_in_the_wrong_order_are_noticed(run):
    with pytest.raises(UsageError) as caught:
        run(data, "upload", "s3://b/x", "folder")
    assert "muster data upload folder s3://b/x" in caught.value.fix


def test_a_dataset_goes_through_its_life(run, tmp_path):
    assert run(dataset, "upload", "d", "folder", "--tag", "t", "--metadata", "k=1") == "d:1\n"
    assert run(dataset, "update", "d", "--add", "folder/a:more") == "d:2\n"
    assert "2 files downloaded" in run(dataset, "download", "d", "back")
    assert json.loads(run(dataset, "list", "--json"))[0]["versions"] == [1, 2]
    assert "d     2       2" in run(dataset, "list")
    assert json.loads(run(dataset, "info", "d:t", "--json"))["metadata"] == {"k": 1}
    assert "more/a" in run(dataset, "info", "d", "--files")
    assert run(dataset, "tag", "d:2", "good") == "d: `good` points to version 2\n"
    assert len(run(dataset, "checksum", "d")) == 65
    assert run(dataset, "verify", "d:1") == "d:1 is whole\n"
    assert run(dataset, "delete", "d:1", "--yes") == "removed: d:1\n"
    assert run(dataset, "gc", "--yes", "--older-than", "0s") == "0 objects removed, 0 B\n"


def test_a_delete_that_is_not_confirmed_removes_nothing(run):
    run(dataset, "upload", "d", "folder")

    with pytest.raises(click.Abort):
        run(dataset, "delete", "d", stdin="n\n")
    assert run(dataset, "verify", "d") == "d:1 is whole\n"


def test_damage_ends_verify_with_an_error(run, tmp_path):
    run(dataset, "upload", "d", "folder")
    object_ = next(path for path in (tmp_path / "sets/objects").rglob("*") if path.is_file())
    object_.write_bytes(b"X")

    with pytest.raises(MusterError, match="1 files of `d` are damaged"):
        run(dataset, "verify", "d")


@pytest.mark.parametrize(
    ("group", "word", "meant"),
    [(dataset, "uplaod", "upload"), (data, "downlaod", "download"), (data, "frobnicate", None)],
)
def test_the_nearest_command_is_suggested(run, group, word, meant):
    with pytest.raises(UsageError) as caught:
        run(group, word)

    assert (f"{meant}`?" if meant else "--help") in caught.value.fix
