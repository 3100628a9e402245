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


@pytest.mark.parametrize("name", ["a", "train", "Train_1", "a-b-c", "t" * 64])
def test_names_of_the_format_are_taken(name):
    assert read(scalars.Name, name) == name


@pytest.mark.parametrize("name", ["", "1a", "-a", "a-", "a_", "a b", "é", "a" * 65, "{{rank}}"])
def test_other_names_are_refused(name):
    assert refused(scalars.Name, name)


@given(st.text(max_size=12))
def test_the_name_that_is_suggested_can_be_one(word):
    try:
        read(scalars.Name, word)
    except ValidationError as error:
        hint = error.errors()[0]["ctx"]["fix"]
        if hint is not None:
            assert scalars.NAME.fullmatch(hint.strip("`"))


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("64Gi", 64 << 30), ("1G", 1 << 30), ("500Mi", 500 << 20), ("2TiB", 2 << 40), (1024, 1024)],
)
def test_sizes_are_binary(text, size_bytes):
    assert read(scalars.Size, text) == size_bytes


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


@pytest.mark.parametrize("value", [0, "0s", "2w", "soon", True, float("inf"), "9" * 50])
def test_what_is_no_time_is_refused(value):
    assert refused(scalars.Seconds, value)


@pytest.mark.parametrize(("text", "seconds"), [("1h30m", 5400), ("PT1H30M", 5400), (1.5, 1.5)])
def test_times_of_the_format_are_taken(text, seconds):
    assert read(scalars.Seconds, text) == seconds


@pytest.mark.parametrize(
    ("text", "ranges"), [("3", ((3, 3),)), (7, ((7, 7),)), ("1-2,9", ((1, 2), (9, 9)))]
)
def test_exit_codes_become_ranges(text, ranges):
    assert read(scalars.ExitRanges, text) == ranges


@pytest.mark.parametrize("value", ["10-1", "3, 4", "", "a", True, -1, "1," * 500 + "1"])
def test_other_exit_codes_are_refused(value):
    assert refused(scalars.ExitRanges, value)


@pytest.mark.parametrize(
    "path",
    ["", "/", "a/", "../a", "a/../b", "/proc/1/mem", "//proc/x", "/./sys/x", "/osmo/x", "\0"],
)
def test_a_file_can_t_lie_just_anywhere(path):
    assert refused(scalars.FilePath, path)


@pytest.mark.parametrize(
    "url", ["s3://bucket/key", "gs://b", "file:///data", "{{output}}/x", "s3://b/{{workflow_id}}"]
)
def test_urls_of_the_format_are_taken(url):
    assert read(scalars.Url, url) == url


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


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../b"])
def test_what_is_sent_lies_in_the_output(path):
    assert refused(scalars.PathInOutput, path)


@pytest.mark.parametrize("name", ["mnist", "team/mnist", "mnist:7", "d-{{workflow_id}}"])
def test_dataset_names_are_taken(name):
    assert read(scalars.DatasetName, name) == name


@pytest.mark.parametrize("name", ["", "../x", "a/b/c", "a:b:c", "my data", "/a"])
def test_other_dataset_names_are_refused(name):
    assert refused(scalars.DatasetName, name)


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


@pytest.mark.parametrize("nodes", ["0", "-1", "two", "4:2", "1:", str(10**6)])
def test_what_is_no_number_of_nodes_is_refused(nodes):
    assert refused(scalars.Nodes, nodes)


def test_a_range_of_nodes_is_taken():
    assert read(scalars.Nodes, "2:4") == "2:4"


@pytest.mark.parametrize("value", [None, True, [], {}, 1, "a", 10**4000])
def test_every_value_has_a_name_without_words_of_python(value):
    words = scalars.kind_of(value)

    assert len(words) < 80
    assert not {"None", "True", "dict", "list()"} & set(words.split())


def test_plain_paths_are_places_and_a_url_with_one_slash_is_none():
    assert read(scalars.Url, "/data/mnist") == "/data/mnist"
    assert read(scalars.Url, "data/mnist") == "data/mnist"
    assert refused(scalars.Url, "/data/../etc")
    assert refused(scalars.Url, "s3:/bucket/data")
