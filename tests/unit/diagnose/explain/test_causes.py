"""Words for causes are an interface: they are documented, all of them, and no others are used."""

import re

from torchmuster.diagnose.explain.causes import CAUSES, as_table
from unit.diagnose.explain.corpus import ROOT

SOURCES = ROOT / "src" / "torchmuster" / "diagnose" / "explain"
USED = re.compile(r'cause="([a-z0-9-]+)"|^\s+\(?"([a-z0-9]+(?:-[a-z0-9]+)+)",$', re.MULTILINE)


def test_every_word_in_the_rules_is_explained():
    used = set()
    for path in SOURCES.glob("rules_*.py"):
        used |= {a or b for a, b in USED.findall(path.read_text())}
    assert used - {"nvidia-smi", "rocm-smi"} <= set(CAUSES)


def test_every_word_is_used():
    text = "".join(path.read_text() for path in SOURCES.glob("*.py") if path.stem != "causes")
    assert [word for word in CAUSES if f'"{word}"' not in text] == []


def test_docs_list_the_words_of_the_code():
    assert as_table() in (ROOT / "docs" / "explain.md").read_text()
