"""The first page that a new user reads shows what its commands print."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "site"))

import shown  # noqa: E402 - a script, not a package

pytestmark = pytest.mark.slow


def test_the_first_run_prints_what_its_page_shows():
    assert not shown.check(ROOT / "docs" / "first-run.md", update=False), (
        "scripts/site/shown.py docs/first-run.md --update"
    )


def test_what_differs_from_run_to_run_is_no_difference_and_another_word_is():
    page = "succeeded after 27.6 s (2 attempts, 124 ms between them)\nepoch 1: loss 0.1\nepoch 2: loss 0.2\n"
    assert shown.plain(page) == shown.plain(
        "succeeded after 1 min 3 s (2 attempts, 1.2 s between them)\nepoch 1: loss 4e-05\n"
    )
    assert shown.plain("failed after 3 s") != shown.plain("succeeded after 3 s")
