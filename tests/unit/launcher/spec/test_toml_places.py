"""Where keys of a TOML file stand."""

import json
import tomllib

from hypothesis import given
from hypothesis import strategies as st

from torchmuster.launcher.spec.site import find_places

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
