import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.workflow.tokens import find_tokens, resolve


@pytest.mark.parametrize(
    ("text", "kind", "argument"),
    [
        ("{{output}}", "output", None),
        ("{{ output }}", "output", None),
        ("{{input:0}}", "input", "0"),
        ("{{ input : prep }}", "input", "prep"),
        ("{{input:wf-1:prep}}", "input", "wf-1:prep"),
        ("{{workflow_id}}", "workflow_id", None),
        ("{{host:worker_1}}", "host", "worker_1"),
        ("{{uuid}}", "uuid", None),
        ("{{ip:a}}", "ip", "a"),
        ("{{rank}}", "rank", None),
        ("{{ num_tasks }}", "num_tasks", None),
        ("{{port}}", "port", None),
        ("{{port:web}}", "port", "web"),
        ("{{attempt}}", "attempt", None),
    ],
)
def test_each_token_is_found_with_its_argument(text, kind, argument):
    (token,) = find_tokens(f"<{text}>")
    assert (token.kind, token.argument, token.text) == (kind, argument, text)
    assert (token.start, token.end) == (1, 1 + len(text))


@pytest.mark.parametrize(
    "text",
    ["{{host}}", "{{host:}}", "{{host: }}", "{{outputs}}", "{output}", "{{host:t{{i}}}}",
     "{{output:1}}", "{{rank\n}}", "{{host:a\nb}}", "{{ foo }}", "{{rank + 1}}"],
)  # fmt: skip
def test_what_is_no_token_is_not_found(text):
    assert find_tokens(text) == []


def test_tokens_are_replaced_in_place_and_unknown_ones_stay():
    values = {"output": "/out", "host": None}
    text = "{{output}}/a {{host:b}} {{ output }}"
    assert resolve(text, lambda token: values[token.kind]) == "/out/a {{host:b}} /out"


def test_a_value_is_not_searched_for_tokens_again():
    assert resolve("{{uuid}}", lambda _: "{{output}}") == "{{output}}"


@given(st.lists(st.sampled_from(["{{", "}}", "output", "host:", "a", " ", "\n", ":", "rank"])))
def test_leaving_all_tokens_leaves_the_text(parts):
    text = "".join(parts)
    assert resolve(text, lambda _: None) == text
    for token in find_tokens(text):
        assert text[token.start : token.end] == token.text


@pytest.mark.parametrize("piece", ["{{", "{{host:", "{{ ", "{{host:" + "a" * 300])
def test_no_text_makes_the_search_slow(piece):
    began = time.process_time()
    assert find_tokens(piece * (1024**2 // len(piece))) == []
    assert time.process_time() - began < 10  # it takes 0.1; a quadratic search, many minutes
