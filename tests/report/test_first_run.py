"""Two pages show what their commands print, the first one that a new user reads among them."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "site"))

import shown  # noqa: E402 - a script, not a package

pytestmark = pytest.mark.slow


PAGES = ("first-run.md", "notify.md")  # those of sessions and sweeps have tests of their own


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_their_page_shows(page):
    assert not shown.check(ROOT / "docs" / page, update=False), (
        f"scripts/site/shown.py docs/{page} --update"
    )


def test_what_differs_from_run_to_run_is_no_difference_and_another_word_is():
    page = "succeeded after 27.6 s (2 attempts, 124 ms between them)\nepoch 1: loss 0.1\nepoch 2: loss 0.2\n"
    assert shown.plain(page) == shown.plain(
        "succeeded after 1 min 3 s (2 attempts, 1.2 s between them)\nepoch 1: loss 4e-05\n"
    )
    assert shown.plain("failed after 3 s") != shown.plain("succeeded after 3 s")
