"""Lists of hosts in the ways that people have them, and where keys of a TOML file stand."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.errors import ManyErrors, UsageError
from torchmuster.launcher.spec.site import find_places
from torchmuster.launcher.spec.site_files import parse_host, parse_hostfile, read_hostfile


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("node1", ("node1", None, None)),
        ("node1 slots=4", ("node1", 4, None)),
        ("node1 slots=4 max_slots=8", ("node1", 4, None)),
        ("node1 cpu=2", ("node1", 2, None)),
        ("node1:4", ("node1", 4, None)),
        ("me@10.0.0.1 slots=2", ("10.0.0.1", 2, "me")),
        ("[fe80::1%eth0]:2", ("fe80::1%eth0", 2, None)),
    ],
)
def test_a_line_of_each_kind(line, expected):
    host = parse_host(line)
    assert (host.name, host.slots, host.user) == expected


@pytest.mark.parametrize(
    "line", ["-oProxyCommand=x", "a b", "a slots=0", "a slots=x", "a:2 slots=2", "a;b", "me@", ""]
)
def test_what_is_no_host(line):
    with pytest.raises(UsageError):
        parse_host(line)


def test_a_file_names_each_bad_line():
    with pytest.raises(ManyErrors) as caught:
        parse_hostfile("a\n-b\n# c\n\nd slot=3\n", "hosts")
    assert [error.where for error in caught.value.errors] == ["hosts:2", "hosts:5"]
    assert caught.value.errors[1].fix == "did you mean `slots`?"


def test_a_repeated_host_adds_its_slots():
    hosts = parse_hostfile("a\nb slots=2 # fast\na\n", "hosts")
    assert [(host.name, host.slots) for host in hosts] == [("a", 2), ("b", 2)]


def test_a_missing_and_an_empty_file_are_errors(tmp_path):
    with pytest.raises(ManyErrors, match="can't be read"):
        read_hostfile(str(tmp_path / "hosts"))
    (tmp_path / "hosts").write_text("# nothing\n")
    with pytest.raises(ManyErrors, match="names no host"):
        read_hostfile(str(tmp_path / "hosts"))


TEXT = '''\
# a comment = "x"
top = [1, "a,]", {b = 2}]   # [no.table]

[engines.gpu]
  "odd key" = """
two = lines"""
a.b = \'\'\'\\\'\'\'
inline = { x = "}", y = [
  1,  # one
  2,
] }

[[list]]
n = 1
[[list]]
n = 1979-05-27 07:32:00
[list.below]
z = "\\"]"
'''


def test_each_key_has_its_line_and_column():
    places = find_places(TEXT)
    assert places["top",] == (2, 1)
    assert places["top", 1] == (2, 11)
    assert places["top", 2, "b"] == (2, 19)
    assert places["engines", "gpu"] == (4, 1)
    assert places["engines", "gpu", "odd key"] == (5, 3)
    assert places["engines", "gpu", "a", "b"] == (7, 1)
    assert places["engines", "gpu", "inline", "y"] == (8, 21)
    assert places["engines", "gpu", "inline", "y", 1] == (10, 3)
    assert places["list", 0, "n"] == (14, 1)
    assert places["list", 1, "n"] == (16, 1)
    assert places["list", 1, "below", "z"] == (18, 1)


def paths_of(value, above=()):
    found = set()
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        found |= {(*above, key)}
        if isinstance(entry, dict | list):
            found |= paths_of(entry, (*above, key))
    return found


def test_it_finds_every_key_that_the_parser_finds():
    assert paths_of(tomllib.loads(TEXT)) == set(find_places(TEXT))


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
values = st.recursive(
    st.integers(0, 9) | words.map(lambda text: text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


def to_toml(value):
    if isinstance(value, dict):
        inner = ", ".join(f"{to_toml(key)} = {to_toml(entry)}" for key, entry in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


@given(st.dictionaries(words, values, max_size=4))
def test_any_file_that_parses_is_walked_through(tables):
    text = "".join(f"{to_toml(key)} = {to_toml(value)}  # x\n" for key, value in tables.items())
    assert paths_of(tomllib.loads(text)) == set(find_places(text))
