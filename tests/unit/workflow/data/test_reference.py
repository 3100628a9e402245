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


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a folder that is the current one, with a home and settings of its own below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return tmp_path


def test_the_environment_comes_before_the_files_and_the_default(here, monkeypatch):
    assert datasets_url() == str(here / "home/datasets")

    os.makedirs(here / "config/muster")
    (here / "config/muster/config.toml").write_text('[datasets]\nurl = "s3://b/sets"\n')
    assert datasets_url() == "s3://b/sets"
    (here / "muster.toml").write_text('[datasets]\nurl = "here"\n')
    assert datasets_url() == str(here / "here")
    monkeypatch.setenv("MUSTER_DATASETS", "/elsewhere")
    assert datasets_url() == "/elsewhere"


@pytest.mark.parametrize("text", ["[datasets", "[datasets]\nurl = 7"])
def test_damaged_settings_are_a_sentence(here, text):
    (here / "muster.toml").write_text(text)

    with pytest.raises(UsageError) as caught:
        datasets_url()
    assert caught.value.where == "muster.toml"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_the_settings_of_another_user_say_nothing_of_where_datasets_are(here, capsys):
    (here / "muster.toml").write_text('[datasets]\nurl = "s3://theirs/sets"\n')
    os.chown(here / "muster.toml", 12345, 12345)

    assert datasets_url() == str(here / "home/datasets")
    assert "is not used: it belongs to another user" in capsys.readouterr().err


def test_words_and_files_are_put_together(tmp_path):
    (tmp_path / "m.yaml").write_text("a: [1, 2]\nday: 2026-01-02\nb: old\n")

    found = parse_metadata([str(tmp_path / "m.yaml"), "b=0.5", "c=x=y", "d=true", "e=null"])

    of_words = {"b": 0.5, "c": "x=y", "d": True, "e": "null"}
    assert found == {"a": [1, 2], "day": "2026-01-02", **of_words}


@pytest.mark.parametrize("text", ["- a", "a: [", "!!python/object:os.system {}"])
def test_a_file_without_keys_and_values_is_a_sentence(tmp_path, text):
    (tmp_path / "m.yaml").write_text(text)

    with pytest.raises(UsageError):
        parse_metadata([str(tmp_path / "m.yaml")])


def test_what_is_neither_a_pair_nor_a_file_is_refused():
    with pytest.raises(UsageError, match="neither `key=value`"):
        parse_metadata(["nothing"])
