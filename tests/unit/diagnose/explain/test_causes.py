"""Words for causes are an interface: they are documented, all of them, and no others are used."""

from torchmuster.diagnose.explain.catalogue.index import (
    CATALOGUE,
    CAUSES,
    RULE_ROWS,
    TABLES,
)
from unit.diagnose.explain.corpus import ROOT

SOURCES = ROOT / "src" / "torchmuster" / "diagnose" / "explain"
ROWS = [*CATALOGUE.by_name.values(), *RULE_ROWS.values()]


def test_every_word_in_the_rows_is_explained():
    used = {word for row in ROWS for word in (row.cause, *row.rivals) if word}
    assert used - set(CAUSES) == set()


def test_every_word_is_used():
    text = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    known = {row.cause for row in ROWS} | TABLES["cured-in-code"].words
    assert [word for word in CAUSES if word not in known and f'"{word}"' not in text] == []


def test_docs_list_the_words_of_the_code():
    rows = [f"| `{word}` | {meaning} |" for word, meaning in CAUSES.items()]
    table = "\n".join(["| cause | what it means |", "|---|---|", *rows, ""])
    assert table in (ROOT / "docs" / "explain.md").read_text()
