"""Words for causes are an interface: they are documented, all of them, and no others are used."""

import importlib

import pytest

from torchmuster.diagnose.explain.causes import CAUSES
from torchmuster.diagnose.explain.rules.rows import Row
from unit.diagnose.explain.corpus import ROOT

SOURCES = ROOT / "src" / "torchmuster" / "diagnose" / "explain"
WITHOUT_ROWS = ("rows", "ranks", "children", "compare", "notes")
MODULES = [
    path.stem for path in (SOURCES / "rules").glob("[a-z]*.py") if path.stem not in WITHOUT_ROWS
]


def rows_in(value):
    """Return the rows that a value of a module holds, in tables of any form."""
    if isinstance(value, Row):
        return [value]
    if not isinstance(value, dict | tuple):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [row for one in inner for row in rows_in(one)]


@pytest.mark.parametrize("name", MODULES)
def test_every_word_in_the_rules_is_explained(name):
    module = importlib.import_module(f"torchmuster.diagnose.explain.rules.{name}")
    tables = [value for key, value in vars(module).items() if not key.startswith("__")]
    rows = [row for value in tables for row in rows_in(value)]
    assert rows
    assert {row.cause for row in rows} <= set(CAUSES)


def test_every_word_is_used():
    text = "".join(path.read_text() for path in SOURCES.rglob("*.py") if path.stem != "causes")
    assert [word for word in CAUSES if f'"{word}"' not in text] == []


def test_docs_list_the_words_of_the_code():
    rows = [f"| `{word}` | {meaning} |" for word, meaning in CAUSES.items()]
    table = "\n".join(["| cause | what it means |", "|---|---|", *rows, ""])
    assert table in (ROOT / "docs" / "explain.md").read_text()
