import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kit.work import num_calls
from torchmuster.errors import UsageError
from torchmuster.workflow.spec.source import MAX_BYTES, parse_yaml

TASK = """\
  - name: task-{}
    image: image
    lead: false
    command: [bash]
    args: [/tmp/run.sh, --x, "1"]
    environment: {{A: 1, B: c}}
    files:
    - path: /tmp/run.sh
      contents: |
        set -ex
        torchrun --nnodes 2
    outputs:
    - url: s3://a/b
"""
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


def refusal(text):
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, "f.yaml")
    return caught.value


def test_keys_and_values_know_their_line_and_column():
    document = parse_yaml("a: 1\nb:\n  - c: x\n  - [y, z]\n", "f.yaml")
    assert document.value == {"a": 1, "b": [{"c": "x"}, ["y", "z"]]}
    assert document.keys[("b", 0, "c")] == (3, 5)
    assert document.values[("b", 0, "c")] == (3, 8)
    assert document.values[("b", 1, 1)] == (4, 9)
    assert document.where(("b", 0, "c"), at_key=True) == "f.yaml:3:5"


def test_a_path_that_is_missing_has_the_place_of_the_key_above():
    document = parse_yaml("a:\n  b: 1\n", "f.yaml")
    assert document.where(("a", "missing", "deep")) == "f.yaml:1:1"


def test_places_go_through_locate():
    document = parse_yaml("a: 1\nb: 2\n", "f.yaml", lambda line, _: (line + 10, None))
    assert document.where(("b",)) == "f.yaml:12"
    with pytest.raises(UsageError) as caught:
        parse_yaml("a: @\n", "f.yaml", lambda line, _: (line + 10, None))
    assert caught.value.where == "f.yaml:11"


@pytest.mark.parametrize(
    "text",
    [
        "a: on\nb: 1_000\nc: 0x10\ne: ~\nf: .5\ng: 'no'\nh: no\ni: !!str 5\nj: 1e3",
        "x: &x {a: 1, b: 2}\ny:\n  <<: *x\n  a: 3",
        "x: &x [1]\ny: [*x, *x]",
        "a: {b: c, d}\ne: >-\n  one\n  two\nf: |\n  x\n   y\n\nt: 2024-01-02",
        "",
        "\ufeffa: 1",
        "- a\n-\n- ''",
    ],
)
def test_values_are_those_of_the_safe_loader(text):
    assert parse_yaml(text, "f.yaml").value == yaml.safe_load(text)


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]", "[" * 100_000, "a: [" + "x," * 2_000_000 + "]",
                                  "x: " + "y" * MAX_BYTES, "x: " + "é" * (MAX_BYTES // 2)])  # fmt: skip
def test_hostile_files_are_refused_soon(text):
    began = time.process_time()
    refusal(text)
    assert (
        time.process_time() - began < 20
    )  # it takes one at most; all that the aliases mean, hours


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3:1", "the key `a` occurs twice"),
        ("a:\n\tb: 1", "f.yaml:2:1", "a tab"),
        ("a:b\nc: d", "f.yaml:2:2", "a space is missing after `:`"),
        ("p: {{output}}/x", "f.yaml:1:14", "`{{` without quotes"),
        ("- {{x}}", "f.yaml:1:4", "a map can't be a key"),
        ("a: *.py", "f.yaml:1:5", "can't begin with `*`"),
        ("a: *py", "f.yaml:1:4", "`*py` names an anchor that does not exist"),
        ("a: & b", "f.yaml:1:5", "can't begin with `&`"),
        ("a: @b", "f.yaml:1:4", "can't begin with `@`"),
        ("a: %b", "f.yaml:1:4", "can't begin with `%`"),
        ("a: !!python/object/apply:os.system [x]", "f.yaml:1:4", "!!python/object/apply:os.system"),
        ("a: !mine 1", "f.yaml:1:4", "the YAML tag `!mine`"),
        ("a: 1\n--- \nb: 1", "f.yaml:2:1", "more than one YAML document"),
        ("b: 1\na: 'x\n", "f.yaml:2:4", "a quotation mark is not closed"),
        ("a: 1\nb: \x01", "f.yaml:2:4", "not YAML"),
        ("a: 2024-99-99", "f.yaml:1:4", "not a valid timestamp"),
        ("a: b: c", "f.yaml:1:5", "a `key:` is not allowed here"),
    ],
)
def test_a_mistake_is_named_with_its_place(text, where, what):
    error = refusal(text)
    assert error.where == where
    assert what in error.what


def test_a_key_that_stands_twice_names_both_lines():
    assert refusal("x:\n  a: 1\n  b: 2\n  a: 3").why == "the other one is in line 2"


@pytest.mark.parametrize("value", ["1", "{b: [1, 2], c: x}", "null"])
def test_a_key_that_stands_twice_and_says_the_same_is_a_warning(value):
    document = parse_yaml(f"a: {value}\nb: 2\na: {value}", "f.yaml")

    (warning,) = document.twice
    assert (warning.what, warning.where) == ("the key `a` occurs twice", "f.yaml:3:1")
    assert warning.why == "the other one is in line 1 with the same value: remove one of them"
    assert list(document.value) == ["a", "b"]


@pytest.mark.parametrize(("first", "second"), [("1", "true"), ("1", "'1'"), ("[1]", "[1, 2]")])
def test_values_that_only_look_alike_are_an_error(first, second):
    assert "occurs twice" in refusal(f"a: {first}\na: {second}").what


def test_twice_as_many_tasks_are_parsed_with_twice_the_work():
    def parse(num_tasks):
        text = "workflow:\n  tasks:\n" + "".join(TASK.format(index) for index in range(num_tasks))
        document = parse_yaml(text, "f.yaml")
        assert len(document.value["workflow"]["tasks"]) == num_tasks

    assert num_calls(lambda: parse(400)) < 2.5 * num_calls(lambda: parse(200))


@given(st.text() | st.lists(st.sampled_from(
    ["a", ": ", "\n", "  ", "- ", "{", "}", "[", "]", "&a ", "*a", "!", "'", '"', "|", ">", "#",
     "\t", "<<", "? ", "%", "@", "---\n", "1", "~", "!!int ", "=", "2024-13-01"])).map("".join))  # fmt: skip
def test_no_text_crashes(text):
    try:
        document = parse_yaml(text, "f.yaml")
    except UsageError as error:
        caught = error.where
        assert caught
    else:
        assert all(document.position(path) >= (1, 1) for path in document.values)


def test_two_numbers_with_a_colon_are_text_and_not_sixty_to_the_unit():
    assert parse_yaml("nodes: 2:4\nport: 8:30", "f.yaml").value == {"nodes": "2:4", "port": "8:30"}


@pytest.mark.parametrize("key", ["on", "no", "null", "~", "true"])
def test_a_key_that_yaml_reads_as_a_value_needs_quotes(key):
    with pytest.raises(UsageError, match="a key is read as") as caught:
        parse_yaml(f"environment:\n  {key}: 1", "f.yaml")

    assert caught.value.where == "f.yaml:2:3"
    assert parse_yaml(f"'{key}': 1", "f.yaml").value == {key: 1}
