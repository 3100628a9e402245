"""The renderer without its process; what the limits of the process do is in test_load.py."""

import datetime as dt
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from torchmuster.workflow.spec.sandbox import answer, pack, unpack
from unit.strategies import JSON_VALUES

VALUES = {"n": 2, "name": "a", "flag": False, "items": ["x", "y\nz"]}
PIECES = [
    "a: ", "\n", "  ", "\n\n", "text", "{{ n }}", "{{- name -}}", "{{ items[1] }}", "{% if n %}",
    "{%- if flag -%}", "{% else %}", "{% endif %}", "{%- endif -%}", "{% for i in range(n) %}",
    "{% for i in items recursive -%}", "{{ i }}", "{% endfor %}", "{%- endfor %}", "{% raw %}",
    "{% endraw %}", "{%- endraw -%}", "{# note\n #}", "{#- x -#}", "{% set z = 'q\nr' %}",
    "{% set z %}", "{% endset %}", "{{ z|length }}", "{% macro m(a) %}", "{% endmacro %}",
    "{{ m(1)|upper }}", "{% filter upper %}", "{% endfilter %}", "{{\nn\n}}", "{% block b %}",
    "{% endblock %}", "{{ self.b()|length }}", "{% call(u) m(3) %}", "{% endcall %}",
    "{{ caller(1) }}", "{% with %}", "{% endwith %}", "{{ missing }}", "\r\n", "{{ loop(items) }}",
    "{{ loop.index }}", "{% autoescape true %}", "{% endautoescape %}", "<&>", "{%+ if n +%}",
]  # fmt: skip


def request(text, **more):
    given = {"text": text, "values": dict(VALUES), "nonce": "918273645m", "max_bytes": 10_000}
    return answer({**given, **more})


def plain(text):
    env = SandboxedEnvironment(undefined=StrictUndefined)
    return env.from_string(text).render(VALUES)


@pytest.mark.parametrize(
    "text",
    [
        "a\n{% for i in range(n) -%}\n\n  b{{ i }}\n{%- endfor %}\nc\n",
        "{% macro m(a) %}x\n{{ a }}{% endmacro %}{{ m(1)|length }}\n{{ m(2) }}",
        "{% filter upper %}a\n{{ n }}{% endfilter %}",
        "{% set z %}a\nb{% endset %}{{ z|length }}",
        "{% block b %}x{% endblock %}{{ self.b()|length }}",
        "{% for i in [[1], [2]] recursive %}{{ loop(i)|length if i is iterable else i }}{% endfor %}",
        "{% raw -%}\n {{ x }}\n{%- endraw %}\n",
        "{% autoescape true %}<{{ '<' }}>{% endautoescape %}",
    ],
)  # fmt: skip
def test_markers_do_not_change_the_text(text):
    assert request(text)["text"] == plain(text)


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_any_template_renders_as_without_markers(text):
    found = request(text)
    try:
        expected = plain(text)
    except (TemplateError, TypeError, RecursionError):
        assert "error" in found
        return
    assert found["text"] == expected
    assert len(found["lines"]) == expected.count("\n") + 1


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\n{{ n }}\nb", [1, 2, 3]),
        ("{% for i in range(2) %}\nx{{ i }}\ny\n{% endfor %}\nz", [1, 2, 3, 2, 2, 3, 4, 5]),
        ("{% if n -%}\n\n  a\n{%- endif %}\nb", [3, 5]),
        ("a\n{{ items[1] }}\nb", [1, 2, 2, 3]),
        ("{{\nn\n}}\nb", [2, 4]),
        ("{# a\n\n#}b\nc", [3, 4]),
        ("{% raw %}\n{{ x }}\n{% endraw %}\ny", [1, 2, 3, 4]),
        ("{% macro m() %}\nx\n{% endmacro %}\n{{ m() }}\nz", [3, 4, 4, 4, 5]),
    ],
)
def test_each_line_knows_the_template_line_it_came_from(text, lines):
    found = request(text)["lines"]
    rendered = request(text)["text"].split("\n")
    solid = [index for index, line in enumerate(rendered) if line.strip()]
    assert len(found) == len(lines)
    assert [found[index] for index in solid] == [lines[index] for index in solid]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "refused"),
        ("{{ 'a' * 10**9 }}", "refused"),
        ("{{ 10**9 * 'a' }}", "refused"),
        ("{{ [1] * 10**9 }}", "refused"),
        ("{{ 2 ** (10 ** 8) }}", "refused"),
        ("{{ '%100000000d' % 1 }}", "refused"),
        ("{{ '%*d' % (100000000, 1) }}", "refused"),
        ("{{ name.__class__ }}", "refused"),
        ("{{ name|attr('__class__') }}", "refused"),
        ("{{ '{0.__class__}'.format(name) }}", "refused"),
        ("{% for i in range(9999) %}{{ i }}{% endfor %}", "size"),
        ("{% if %}", "syntax"),
        ("{{ missing }}", "undefined"),
        ("{{ name.missing }}", "undefined"),
        ("{{ 1 / 0 }}", "failed"),
        ("{% include 'x' %}", "failed"),
        ("{{ " + "(" * 9000 + ")" * 9000 + " }}", "depth"),
    ],
)
def test_an_error_has_a_kind_and_a_line(text, kind):
    error = request("a\nb\n" + text)["error"]
    assert error["kind"] == kind
    assert error["line"] == (None if kind == "depth" else 3)


def test_all_missing_names_are_found():
    found = request("{{ a1 }}\n{% for i in range(a2) %}{{ a3 }}{% endfor %}")
    assert found["undefined"] == [["a1", 1], ["a2", 2], ["a3", 2]]


def test_names_that_the_template_looks_up_are_told():
    assert request("{{ n }}{% set q = 1 %}{{ q }}{% if flag %}{% endif %}")["undeclared"] == [
        "flag",
        "n",
    ]


@given(JSON_VALUES)
def test_values_survive_the_way_through_json(value):
    assert unpack(json.loads(json.dumps(pack(value)))) == value


def test_keys_that_are_no_text_stay_what_they_are():
    value = {1: "a", 2.5: ["b"], None: {}}
    assert unpack(json.loads(json.dumps(pack(value)))) == value


def test_a_date_travels_as_text():
    assert pack(dt.date(2024, 1, 2)) == "2024-01-02"
