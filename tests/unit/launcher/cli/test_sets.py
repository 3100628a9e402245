import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.errors import UsageError
from torchmuster.launcher.cli.sets import MANY, spread


@pytest.mark.parametrize(
    ("line", "spread_line"),
    [
        ("--set a=1 b=2 train.yaml --set c=3", "--set a=1 --set b=2 train.yaml --set c=3"),
        ("--set n=1 data=x.yaml train.yaml", "--set n=1 --set data=x.yaml train.yaml"),
        ("--set a=1 --json b=2", "--set a=1 --json b=2"),
        ("-- --set a=1 b=2", "-- --set a=1 b=2"),
    ],
    ids=[
        "each value",
        "a value that looks like a file that is not there",
        "another option ends the values",
        "nothing behind two hyphens",
    ],
)
def test_each_value_gets_an_option_of_its_own(line, spread_line):
    assert spread(line.split()) == spread_line.split()


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


@given(st.lists(st.sampled_from(["--set", "--set-env", "a=1", "b=2", "x", "--json", "--", "="])))
def test_no_word_is_lost_or_changed(words):
    out = spread(words)

    assert [word for word in out if word not in MANY] == [w for w in words if w not in MANY]
