import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.ranks import compress_counts
from torchmuster.launcher.model.scheduler import MAX_NODES, expand_counts, expand_hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3-4],m7", ["n1", "n3", "n4", "m7"]),
        ("r[1-2]-n[01-02]x", ["r1-n01x", "r1-n02x", "r2-n01x", "r2-n02x"]),
        ("login,gpu-a.cluster.org", ["login", "gpu-a.cluster.org"]),
        ("n[3,1]", ["n3", "n1"]),
    ],
)
def test_host_list_gives_its_names_in_order(text, names):
    assert expand_hostlist(text) == tuple(names)


@pytest.mark.parametrize(
    "text", ["", "n[1", "n1]", "n[]", "n[a-b]", "n[3-1]", "a,,b", "n[[1]]", "n[1-]", "]n["]
)
def test_other_text_is_an_error(text):
    with pytest.raises(ValueError, match="is no"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    "text", ["n[0-65536]", "n[1-999999999999]", "n[1-999][1-999]", "n[1-40000],m[1-40000]"]
)
def test_host_list_of_too_many_names_is_an_error(text):
    with pytest.raises(ValueError, match=f"more than {MAX_NODES}"):
        expand_hostlist(text)


@given(st.integers(0, 500), st.integers(0, 200), st.integers(1, 5))
def test_range_is_what_it_was_made_from(first, more, width):
    text = f"n[{first:0{width}d}-{first + more:0{width}d}]"
    want = tuple(f"n{number:0{width}d}" for number in range(first, first + more + 1))
    assert expand_hostlist(text) == want


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("8(x2),4", (8, 8, 4)), ("1(x3)", (1, 1, 1))]
)
def test_counts_are_repeated(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "4(x)", "x2", "4,", "1(x99999999)"])
def test_other_counts_are_an_error(text):
    with pytest.raises(ValueError, match="not a valid list of counts"):
        expand_counts(text)


@pytest.mark.parametrize(
    ("counts", "text"), [((2, 2, 1), "2(x2),1"), ((1,), "1"), ((1, 2, 1), "1,2,1"), ((), "")]
)
def test_counts_are_written_as_slurm_writes_them(counts, text):
    assert compress_counts(counts) == text
    assert not counts or expand_counts(text) == counts
