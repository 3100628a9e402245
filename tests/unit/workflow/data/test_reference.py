import os

import pytest

from torchmuster.errors import UsageError
from torchmuster.workflow.data.reference import (
    check_tag,
    datasets_url,
    parse_metadata,
    parse_reference,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("d", ("d", None, None)),
        ("b/d_1-x:3", ("b/d_1-x", 3, None)),
        ("d:best", ("d", None, "best")),
        ("d:latest", ("d", None, None)),
    ],
)
def test_a_name_has_a_bucket_and_a_version_or_a_tag(text, parts):
    found = parse_reference(text)

    assert (found.name, found.version, found.tag) == parts


@pytest.mark.parametrize("text", ["", "a/b/c", "../d", "d:", "d:a b", "a b", "d:1:2", "/d", "d\n"])
def test_other_names_are_refused(text):
    with pytest.raises(UsageError, match="not a valid name of a dataset"):
        parse_reference(text)


@pytest.mark.parametrize("tag", ["latest", "7", "a/b", ""])
def test_a_tag_that_reads_as_something_else_is_refused(tag):
    with pytest.raises(UsageError):
        check_tag(tag)


def test_the_environment_comes_before_the_files_and_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MUSTER_DATASETS", raising=False)
    assert datasets_url() == str(tmp_path / "home/datasets")

    os.makedirs(tmp_path / "config/muster")
    (tmp_path / "config/muster/config.toml").write_text('[datasets]\nurl = "s3://b/sets"\n')
    assert datasets_url() == "s3://b/sets"
    (tmp_path / "muster.toml").write_text('[datasets]\nurl = "here"\n')
    assert datasets_url() == str(tmp_path / "here")
    monkeypatch.setenv("MUSTER_DATASETS", "/elsewhere")
    assert datasets_url() == "/elsewhere"


@pytest.mark.parametrize("text", ["[datasets", "[datasets]\nurl = 7"])
def test_damaged_settings_are_a_sentence(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MUSTER_DATASETS", raising=False)
    (tmp_path / "muster.toml").write_text(text)

    with pytest.raises(UsageError) as caught:
        datasets_url()
    assert caught.value.where == "muster.toml"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_the_settings_of_another_user_say_nothing_of_where_datasets_are(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MUSTER_DATASETS", raising=False)
    (tmp_path / "muster.toml").write_text('[datasets]\nurl = "s3://theirs/sets"\n')
    os.chown(tmp_path / "muster.toml", 12345, 12345)

    assert datasets_url() == str(tmp_path / "home/datasets")
    assert "is not used: it belongs to another user" in capsys.readouterr().err


def test_words_and_files_are_put_together(tmp_path):
    (tmp_path / "m.yaml").write_text("a: [1, 2]\nday: 2026-01-02\nb: old\n")

    found = parse_metadata([str(tmp_path / "m.yaml"), "b=0.5", "c=x=y", "d=true", "e=null"])

    assert found == {
        "a": [1, 2],
        "day": "2026-01-02",
        "b": 0.5,
        "c": "x=y",
        "d": True,
        "e": "null",
    }


@pytest.mark.parametrize("text", ["- a", "a: [", "!!python/object:os.system {}"])
def test_a_file_without_keys_and_values_is_a_sentence(tmp_path, text):
    (tmp_path / "m.yaml").write_text(text)

    with pytest.raises(UsageError):
        parse_metadata([str(tmp_path / "m.yaml")])


def test_what_is_neither_a_pair_nor_a_file_is_refused():
    with pytest.raises(UsageError, match="neither `key=value`"):
        parse_metadata(["nothing"])
