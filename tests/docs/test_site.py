"""The documentation as a site, and the error book in it, which is made from what `muster explain` knows."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from kit.browser import Look, chromium, needs_chromium
from kit.command import ran
from torchmuster.diagnose.explain.catalogue.index import CATALOGUE, CAUSES, RULE_ROWS, read_messages
from torchmuster.launcher.files.paragraphs import read_paragraphs

ROOT = Path(__file__).parents[2]
SEARCHES = Path(__file__).with_name("searches.txt")
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)")


def read_searches():
    """Return what people type, with the pages that they would expect."""
    lines = [line for line in SEARCHES.read_text().splitlines() if line and line[0] != "#"]
    parted = [line.rpartition(" -> ") for line in lines]
    return [(query, pages.split()) for query, _, pages in parted]


def prose_of(page):
    """Return the lines of a page without its front matter, code and empty lines."""
    text = re.sub(r"\A---\n.*?\n---\n|^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if line and not line.startswith("    ")]


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
    done = ran(
        [sys.executable, *words, "--site-dir", str(folder)],
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
def test_every_page_begins_with_the_cure(pages, book, cause):
    """Then come what it means, how to confirm it and the messages; background comes last."""
    lines = prose_of(pages[f"errors/{cause}.md"])
    written = {page.name: page for page in read_paragraphs(str(book.PAGES))}[cause]
    assert lines[0].startswith("# ")
    assert lines[1] == written.one("do")
    assert 0 < len(re.findall(r"[.](?: |$)", lines[1])) <= 3, "one or two sentences"
    assert re.fullmatch(r"- \*\*What it means\*\*: \S.*", lines[2])
    assert re.fullmatch(r"- \*\*Confirm\*\*: \S.*", lines[3])
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[-1] == "## Background"
    if "Messages that lead here:" in lines:
        assert lines[4] == "Messages that lead here:"
        assert lines.index(headings[0]) > 4


@pytest.mark.parametrize("cause", CAUSES)
def test_every_message_and_case_of_a_page_has_its_cure(pages, cause):
    _, *parts, _ = re.split(r"^## ", pages[f"errors/{cause}.md"], flags=re.MULTILINE)
    for part in parts:
        assert "- **Cure" in part, part


def test_what_the_book_says_itself_is_of_causes_and_rows_that_are_there(pages, book):
    written = [page.name for page in read_paragraphs(str(book.PAGES))]
    assert written == list(CAUSES)
    for words in (book.CONFIRM, book.MEANING):
        assert set(words) <= set(CAUSES)
    rows = {**CATALOGUE.by_name, **RULE_ROWS}
    for name in (*book.MEANINGS_OF, *book.CURES_OF):
        assert name in rows, name
        assert rows[name].cause, name


def test_no_field_of_the_catalogue_is_left_in_a_page(pages, book):
    """Neither as it is written there, nor as a word in capitals that only its author understands."""
    field = r"(?<!\{)\{(\w+)[^{}]*\}(?!\})"
    rows = [*read_messages(), *RULE_ROWS.values()]
    names = {
        name
        for row in rows
        for text in (row.error, row.hint, row.confirm or "")
        for name in re.findall(field, text)
    }
    for path, page in pages.items():
        for line in prose_of(page):
            bare = re.sub(r"`[^`]*`", "", line)
            assert not [name for name in names if f"{{{name}}}" in bare], (path, line)
            assert "{{" not in bare, (path, line)
    for row in rows:
        for text, said in ((row.error, book.meaning(row)), (row.hint, book.advice(row))):
            bare = re.sub(r"`[^`]*`", "", said)  # in a command they stand for a value
            capitals = set(re.findall(r"\b[A-Z]{2,}\b", bare)) - set(re.findall(r"[A-Z]{2,}", text))
            assert not capitals & {name.upper() for name in re.findall(field, text)} - {"NAME"}, (
                said
            )


def test_no_piece_of_an_expression_is_left_in_a_message(pages):
    for path, page in pages.items():
        for line in page.partition("\n## ")[0].splitlines():
            if line.startswith("    "):
                left = re.findall(r"\(\?|\\[dwsSWDb]|\[\^|[.\])][*+?](?=\W|$)|\.{4}", line)
                assert not left, (path, line)


def test_no_page_names_a_test(pages, book):
    origins = {
        json.loads(path.read_text())["from"] for path in book.INCIDENTS.glob("*/expect.json")
    }
    for path, page in pages.items():
        assert not [origin for origin in origins if origin and origin in page], path
        assert not re.findall(r"reconstructed|tests/|namespaces:", page), path


@pytest.mark.parametrize(
    ("wording", "shown"),
    [
        (r"ibv_modify_qp failed with (?:error |(?P<errno>\d+) )(?P<why>[A-Z][^,]*)", "ibv_modify_qp failed with error ..."),
        (r"[Ff]ailed to (?:create|start) (?:the )?timer", "Failed to create the timer"),
        (r"HTTPConnectionPool\(host='(?P<host>[^']+)'", "HTTPConnectionPool(host='...'"),
        (r"no\s+space\s*left\b", "no space left"),
        (r"\d+/\d+ nodes are available:.*Insufficient cpu", "N/N nodes are available: ... Insufficient cpu"),
        (r"\S*ResourceExhaustedError", "ResourceExhaustedError"),
        (r"\S+\.cu:\d+: failed", "cu:N: failed"),
    ],
)  # fmt: skip
def test_an_expression_is_shown_as_a_message(book, wording, shown):
    assert book.readable(wording) == shown


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(CAUSES) + 30
    for page in pages:
        text = page.read_text()
        assert not LOADED.findall(text), page
    assert (site / "assets" / "iframe-worker.js").exists()


@pytest.mark.slow
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


@pytest.mark.slow
@needs_chromium()
def test_what_people_search_for_is_among_the_first_three_hits(site):
    """In one browser: a start of it takes longer than all searches."""
    wrong = []
    with chromium() as browser, Look(browser, site / "index.html") as look:
        for query, expected in read_searches():
            found = first_hits(look, site, query)
            if not set(found) & set(expected):
                wrong.append(f"{query}: {', '.join(found)}; not {' or '.join(expected)}")
        assert look.said == []
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@needs_chromium()
def test_the_page_of_a_message_is_its_first_hit(site, book):
    wrong = []
    with chromium() as browser, Look(browser, site / "index.html") as look:
        for page in read_paragraphs(str(book.PAGES)):
            found = first_hits(look, site, page.one("title"))
            if found[0] != f"errors/{page.name}":
                wrong.append(f"{page.one('title')}: {', '.join(found)}; not {page.name}")
        assert look.said == []
    assert not wrong, "\n".join(wrong)


def first_hits(look, site, query):
    """Return the pages of the first three hits of what is put into the search box."""
    look.page.fill("input[name=query]", "")
    look.page.wait_for_function(
        "document.querySelectorAll('.md-search-result__item').length === 0", timeout=60_000
    )
    look.page.focus("input[name=query]")
    look.page.keyboard.insert_text(query)  # as a paste, or a fast typist
    look.page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
    addresses = look.value(
        "[...document.querySelectorAll('.md-search-result__item')].slice(0, 3)"
        ".map((hit) => hit.querySelector('a').href)"
    )
    begin = f"file://{site}/"
    return [re.sub(r"\.html.*", "", address.removeprefix(begin)) for address in addresses]


@pytest.mark.slow
def test_the_searches_and_their_weights_name_pages_that_are_there(site, book):
    import found_by

    expected = {page for _, pages in read_searches() for page in pages}
    for name in (*expected, *found_by.WEIGHTS, *found_by.WORDS):
        assert (site / f"{name}.html").exists(), name
    assert len(read_searches()) >= 30


def test_a_page_says_the_words_that_it_is_found_by(book):
    """What the search is told of a page is no promise that the page does not hold."""
    import found_by

    for name, words in found_by.WORDS.items():
        text = (ROOT / "docs" / f"{name}.md").read_text().lower()
        for word in words:
            told = [part for part in re.findall(r"[\w-]+", word.lower()) if len(part) > 1]
            assert all(part.strip("-") in text for part in told), (name, word)


@pytest.mark.slow
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
