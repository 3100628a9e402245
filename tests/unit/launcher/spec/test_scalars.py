import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from torchmuster.launcher.spec import scalars


def read(kind, value):
    return TypeAdapter(kind).validate_python(value)


def refused(kind, value):
    """Return (what, hint) of a value that is refused."""
    with pytest.raises(ValidationError) as caught:
        read(kind, value)
    context = caught.value.errors()[0]["ctx"]
    return context["what"], context["fix"]


TAKEN = {
    "Name": ["a", "train", "Train_1", "a-b-c", "t" * 64],
    "Nodes": ["2:4"],
    "Url": ["s3://bucket/key", "gs://b", "file:///data", "{{output}}/x", "s3://b/{{workflow_id}}"],
    "DatasetName": ["mnist", "team/mnist", "mnist:7", "d-{{workflow_id}}"],
}
REFUSED = {
    "Name": ["", "1a", "-a", "a-", "a_", "a b", "é", "a" * 65, "{{rank}}"],
    "Seconds": [0, "0s", "2w", "soon", True, float("inf"), "9" * 50],
    "ExitRanges": ["10-1", "3, 4", "", "a", True, -1, "1," * 500 + "1"],
    # A file can't lie just anywhere, and what is sent lies in the output.
    "FilePath": ["", "/", "a/", "../a", "a/../b", "\0"],
    "PathInOutput": ["/etc", "../x", "a/../../b"],
    "Url": ["/data/../etc", "s3:/bucket/data"],
    "DatasetName": ["", "../x", "a/b/c", "a:b:c", "my data", "/a"],
    "Nodes": ["0", "-1", "two", "4:2", "1:", str(10**6)],
}


PLAIN_PATHS = {"Url": ["/data/mnist", "data/mnist"]}
SYSTEM_PATHS = {"FilePath": ["/proc/1/mem", "//proc/x", "/./sys/x", "/osmo/x"]}


def cases(table):
    return [(kind, value) for kind, values in table.items() for value in values]


@pytest.mark.parametrize(("kind", "text"), [*cases(TAKEN), *cases(PLAIN_PATHS)])
def test_texts_of_the_format_are_taken_as_they_are(kind, text):
    assert read(getattr(scalars, kind), text) == text


@pytest.mark.parametrize(("kind", "value"), [*cases(REFUSED), *cases(SYSTEM_PATHS)])
def test_others_are_refused(kind, value):
    assert refused(getattr(scalars, kind), value)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("Size", "64Gi", 64 << 30),
        ("Size", "1G", 1 << 30),
        ("Size", "500Mi", 500 << 20),
        ("Size", "2TiB", 2 << 40),
        ("Size", 1024, 1024),
        ("Seconds", "1h30m", 5400),
        ("Seconds", "PT1H30M", 5400),
        ("Seconds", 1.5, 1.5),
        ("ExitRanges", "3", ((3, 3),)),
        ("ExitRanges", 7, ((7, 7),)),
        ("ExitRanges", "1-2,9", ((1, 2), (9, 9))),
    ],
)
def test_sizes_times_and_exit_codes_become_numbers(kind, text, value):
    assert read(getattr(scalars, kind), text) == value


@given(st.text(max_size=12))
def test_the_name_that_is_suggested_can_be_one(word):
    try:
        read(scalars.Name, word)
    except ValidationError as error:
        hint = error.errors()[0]["ctx"]["fix"]
        if hint is not None:
            assert scalars.NAME.fullmatch(hint.strip("`"))


@pytest.mark.parametrize(
    ("text", "hint"), [("1GB", "1Gi"), ("10gb", "10Gi"), ("1.5Gi", "1536Mi"), ("500mb", "500Mi")]
)
def test_a_size_in_other_words_is_refused_with_the_right_one(text, hint):
    assert refused(scalars.Size, text) == (f"`{text}` is not a valid size", hint)
    assert read(scalars.Size, hint) > 0


@pytest.mark.parametrize("kind", [scalars.WholeNumber, scalars.Size, scalars.Seconds])
@pytest.mark.parametrize("value", [-1, "-1"])
def test_nothing_that_is_counted_is_negative(kind, value):
    assert "negative" in refused(kind, value)[0]


@pytest.mark.parametrize("value", [True, 1.5, "500m", "1e3", [1], None])
def test_a_number_of_cpus_is_whole(value):
    assert "whole number" in refused(scalars.WholeNumber, value)[0]


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("s33://b/k", "did you mean `s3://`?"),
        ("s3:/b/k", "s3://b/k"),
        ("s3://", "s3://BUCKET/FOLDER"),
    ],
)
def test_another_url_is_refused_with_a_right_one(url, hint):
    assert refused(scalars.Url, url)[1] == hint


def test_the_words_of_a_command_line_are_suggested_as_a_list():
    what, hint = refused(scalars.Words, "python train.py --name 'a b'")

    assert "expected a list" in what
    assert hint == '[python, train.py, --name, "a b"]'


@pytest.mark.parametrize("value", ["yes", "True", "on", True])
def test_words_for_true_are_true(value):
    assert read(scalars.Flag, value) is True


@pytest.mark.parametrize("value", ["maybe", 1, None, []])
def test_other_flags_are_refused(value):
    assert "expected true or false" in refused(scalars.Flag, value)[0]


@pytest.mark.parametrize("value", [None, True, [], {}, 1, "a", 10**4000])
def test_every_value_has_a_name_without_words_of_python(value):
    words = scalars.kind_of(value)

    assert len(words) < 80
    assert not {"None", "True", "dict", "list()"} & set(words.split())
