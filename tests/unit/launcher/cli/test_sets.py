import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.errors import UsageError
from torchmuster.launcher.cli.sets import MANY, spread


def test_each_value_gets_an_option_of_its_own():
    words = ["--set", "a=1", "b=2", "train.yaml", "--set", "c=3"]

    assert spread(words) == ["--set", "a=1", "--set", "b=2", "train.yaml", "--set", "c=3"]


@pytest.mark.parametrize("option", MANY)
@pytest.mark.parametrize("name", ["train.yaml", "lr=1.yaml", "runs/a=b/train.yml", "train"])
def test_the_file_is_never_a_value(option, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a=b").mkdir(parents=True)
    (tmp_path / name).write_text("")

    assert spread([option, "a=1", "b=2", name])[-1] == name
    assert spread([option, "a=1", "b=2", name])[-2] == "b=2"
    assert spread([name, option, "a=1", "b=2"])[0] == name


def test_an_option_without_a_value_does_not_take_the_file(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("")

    with pytest.raises(UsageError, match="`--set` needs a value") as caught:
        spread(["--set", str(file)])

    assert caught.value.where == str(file)


def test_a_value_may_look_like_a_file_that_is_not_there():
    words = ["--set", "n=1", "data=x.yaml", "train.yaml"]

    assert spread(words) == ["--set", "n=1", "--set", "data=x.yaml", "train.yaml"]


def test_another_option_ends_the_values():
    words = ["--set", "a=1", "--json", "b=2"]

    assert spread(words) == words


def test_nothing_is_spread_behind_two_hyphens():
    words = ["--", "--set", "a=1", "b=2"]

    assert spread(words) == words


@given(st.lists(st.sampled_from(["--set", "--set-env", "a=1", "b=2", "x", "--json", "--", "="])))
def test_no_word_is_lost_or_changed(words):
    out = spread(words)

    assert [word for word in out if word not in MANY] == [w for w in words if w not in MANY]
