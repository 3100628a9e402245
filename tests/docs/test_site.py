"""The documentation as a site, and the error book in it, which is made from what `muster explain` knows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.browser import Look, chromium, needs_chromium
from torchmuster.diagnose.explain.catalogue.index import read_messages
from torchmuster.diagnose.explain.causes import CAUSES

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)")


@pytest.fixture(scope="module")
def book():
    sys.path.insert(0, str(ROOT / "scripts" / "site"))
    try:
        import error_book

        yield error_book
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def pages(book):
    return book.pages()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does; a link that leads nowhere fails it."""
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "mkdocs", "build", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [sys.executable, *words, "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_cause_has_a_page_and_stands_in_the_index(pages):
    assert set(pages) == {"errors/index.md", *(f"errors/{cause}.md" for cause in CAUSES)}
    linked = re.findall(r"\]\(([\w-]+)\.md\)", pages["errors/index.md"])
    assert sorted(linked) == sorted(CAUSES)


def test_every_message_with_a_cause_is_on_its_page(pages, book):
    for entry in read_messages():
        if entry.cause:
            page = pages[f"errors/{entry.cause}.md"]
            assert entry.source in page, entry.name
            shown = [book.readable(wording) for wording in entry.says]
            assert any(f"    {text}\n" in page for text in shown if text.strip(" .")), entry.name


@pytest.mark.parametrize("cause", CAUSES)
def test_every_page_says_what_it_means_how_to_confirm_it_and_what_helps(pages, cause):
    page = pages[f"errors/{cause}.md"]
    for title in ("**What it means**", "**Confirm**", "**Cure"):
        assert f"- {title}" in page, title


def test_nothing_is_said_of_a_cause_that_its_messages_say(pages, book):
    for words in (book.CONFIRM, book.MEANING, book.CURE):
        assert set(words) <= set(CAUSES)
        for cause in words:
            assert "## In general" in pages[f"errors/{cause}.md"], cause


def test_no_field_of_the_catalogue_is_left_in_a_page(pages):
    names = {
        name
        for entry in read_messages()
        for text in (entry.error, entry.hint, entry.confirm or "")
        for name in re.findall(r"(?<!\{)\{(\w+)[^{}]*\}(?!\})", text)
    }
    prose = "\n".join(
        line
        for page in pages.values()
        for line in page.splitlines()
        if line.startswith(("- **What", "- **Cure", "- **Confirm"))
    )
    assert not [name for name in sorted(names) if f"{{{name}}}" in prose]


@pytest.mark.parametrize(
    ("wording", "shown"),
    [
        (r"ibv_modify_qp failed with (?:error |(?P<errno>\d+) )(?P<why>[A-Z][^,]*)", "ibv_modify_qp failed with error ..."),
        (r"[Ff]ailed to (?:create|start) (?:the )?timer", "Failed to create the timer"),
        (r"HTTPConnectionPool\(host='(?P<host>[^']+)'", "HTTPConnectionPool(host='...'"),
        (r"no\s+space\s*left\b", "no space left"),
    ],
)  # fmt: skip
def test_an_expression_is_shown_as_a_message(book, wording, shown):
    assert book.readable(wording) == shown


def test_the_site_builds_and_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(CAUSES) + 30
    for page in pages:
        text = page.read_text()
        assert not LOADED.findall(text), page
    assert (site / "assets" / "iframe-worker.js").exists()


def test_errors_are_found_by_the_search(site):
    index = (site / "search" / "search_index.js").read_text()
    assert "ibv_modify_qp failed with error" in index
    assert "errors/port-taken.html" in index


@pytest.mark.slow
@needs_chromium()
def test_a_browser_without_a_network_searches_the_site(site):
    """Not by the index: by the box that a reader types into, from the files as they lie there."""
    with chromium() as browser, Look(browser, site / "index.html") as look:
        look.page.click("input[name=query]")
        look.page.keyboard.type("ibv_modify_qp failed")
        hit = look.page.locator(".md-search-result__link[href*='errors/']").first
        hit.wait_for(timeout=60_000)
        hit.click()
        look.page.wait_for_url("**/errors/*.html*", timeout=60_000)
        assert "ibv_modify_qp" in look.page.inner_text("article")
        assert [url for url in look.asked if not url.startswith(("file:", "blob:"))] == []
        assert look.said == []


def test_the_navigation_has_every_page(site):
    front = (site / "index.html").read_text()
    for path in ROOT.glob("docs/*.md"):
        assert f'href="{path.stem}.html"' in front or path.stem == "index", path.name


def test_the_picture_of_the_readme_is_what_the_view_makes_of_its_facts(book):
    import picture

    facts = json.loads(picture.FACTS.read_text())
    assert picture.PICTURE.read_text() == picture.draw_svg(facts), (
        "python scripts/site/picture.py --draw"
    )
    assert "SIGKILL in rank 3" in json.dumps(facts)  # a real run, of which a worker was killed
    assert "docs/pictures/top.svg" in (ROOT / "README.md").read_text()


def test_the_picture_loads_nothing(book):
    import picture

    loaded = re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?([^\"')]+)", picture.PICTURE.read_text())
    assert all(target.startswith("#") for target in loaded), loaded
