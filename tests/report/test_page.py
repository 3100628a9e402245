"""The page of a run in a real browser: nothing is loaded, nothing is wrong, all is drawn, read and found."""

import itertools
import re

import pytest

from kit.browser import Look, chromium, needs_chromium
from kit.records import EVENTS, TRAINING, event, failure, make_run, over, result, sample
from torchmuster.core.model.states import RunState
from torchmuster.report.compare import compare
from torchmuster.report.find import find_story
from torchmuster.report.page import render_comparison, render_page
from unit.report.test_find import made as made_sweep
from unit.report.test_sheet import story_of as story_of_nodes

pytestmark = needs_chromium()
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)
NUM_RANKS = 512
METRICS = [{"loss": 3.0 / (n + 1), "accuracy": n / 5000} for n in range(5000)]
LOSSES = [event(5 + n / 1e3, "metrics", step=n + 1, values=told) for n, told in enumerate(METRICS)]
USE = {"cpus": (0.5,) * 8, "gpu_percent": (90,) * 8, "gpu_mib": (4000,) * 8}
DATA = (0.1,) * 5 + (2.0,) + (0.1,) * 2
SAMPLES = [
    sample(10 * n, steps=(n * 100,) * 8, data=DATA, rss_mib=(1000 + n,) * 8, **USE)
    for n in range(1, 30)
]
DATA_OF_MANY = tuple(0.1 + 0.001 * (rank % 7) for rank in range(NUM_RANKS))
MANY = [sample(10 * n, steps=(n * 100,) * NUM_RANKS, data=DATA_OF_MANY) for n in range(1, 20)]
PAIRS = [[a, b, None, 50 + a, 2000.0 - 100 * b] for a, b in itertools.permutations(range(4), 2)]
FOUND = {"interface": "hsn0", "subnet": "10.0.0.0/24", "gbit_per_s": "23", "latency_s": 5e-5}
NODES = {"num_nodes": 4, "nodes": ["n1", "n2", "n3", "n4"]}
NETWORK = event(0.5, "network", pairs=PAIRS, unused=[], **FOUND, **NODES)
FAILED = [*EVENTS[:-1], failure(25, 1, tail=["x" * 300]), over(25, "failed")]


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Give the path of each page by its name."""
    folder = tmp_path_factory.mktemp("pages")
    told = [event(6, "metrics", step=n, values={HOSTILE: float(n)}) for n in range(1, 5)]
    noticed = [event(0, "run_started"), event(1, "notice", text=HOSTILE), *EVENTS[1:5]]
    failed = failure(11, 0, what=HOSTILE, tail=[HOSTILE])
    samples = [sample(10 * n, steps=(n * 9,) * 3, data=(1.0, 1.0, 2.0)) for n in (1, 2)]
    samples = [{**one, "nodes": [HOSTILE] * 3} for one in samples]
    good = [EVENTS[0], NETWORK, *EVENTS[1:]], [TRAINING[0], *LOSSES, *TRAINING[-2:]], SAMPLES
    hostile = [*noticed, failed], [TRAINING[0], *told], samples, result(RunState.FAILED, HOSTILE)
    runs = {
        "good": make_run(folder / "good", *good, result()),
        "many": make_run(folder / "many", EVENTS, TRAINING, MANY, result()),
        "plain": make_run(folder / "plain", EVENTS, None, (), result()),
        "failed": make_run(
            folder / "failed", FAILED, TRAINING, (), result(RunState.FAILED, "rank 3 was killed")
        ),
        "empty": make_run(folder / "empty", [], None),
        "hostile": make_run(folder / "hostile", *hostile, args=(HOSTILE,)),
    }
    stories = {name: find_story(run.path) for name, run in runs.items()}
    stories["sweep"] = find_story(made_sweep(folder / "swept").path)
    stories["wide"] = story_of_nodes(folder / "wide", 40)
    texts = {name: render_page(story) for name, story in stories.items()}
    one, other = stories["good"], stories["failed"]
    texts["compared"] = render_comparison(compare(one, other), one, other)
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


NAMES = ["good", "many", "plain", "failed", "empty", "hostile", "compared", "sweep", "wide"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (400, "dark")])
def test_nothing_is_loaded_nothing_is_said_and_axe_finds_nothing(
    browser, pages, name, width, theme
):
    with Look(browser, pages[name], width=width, theme=theme) as look:
        look.value("document.querySelectorAll('details').forEach(one => { one.open = true })")

        assert look.violations() == []
        # Only plots and tables scroll.
        assert look.value("document.documentElement.scrollWidth") <= width
        assert look.value("document.title") != "owned"
        assert look.said == []
        assert look.asked == []


def test_all_plots_are_drawn(browser, pages):
    with Look(browser, pages["good"]) as look:
        heads = "[...document.querySelectorAll('figure h3')]"
        titles = look.value(f"{heads}.map(one => one.textContent)")
        empty = look.value(
            """[...document.querySelectorAll('figure .scroll > svg')].filter(svg => {
                 const marks = [...svg.querySelectorAll('path:not(.grid), rect, image')];
                 const boxes = marks.map(one => one.getBBox());
                 return !boxes.some(box => box.width > 100 || box.height > 20);
               }).length"""
        )
        # Hidden at 0,0.
        look.value("document.querySelectorAll('.cursor').forEach(one => { one.remove() })")
        outside = look.value(
            """[...document.querySelectorAll('figure .scroll > svg')].filter(svg => {
                 const room = svg.viewBox.baseVal, box = svg.getBBox();
                 return box.x < -1 || box.y < -1 || box.x + box.width > room.width + 1 || box.y + box.height > room.height + 1;
               }).map(svg => svg.querySelector('title').textContent)"""
        )

    assert titles == [
        *("Attempts over time", "Ranks over time", "loss", "accuracy", "Time of a step"),
        "A step of each rank, by phase",
        *("Own work of each rank over time", "Processors used by a rank", "Memory of a rank"),
        *("GPU utilization", "GPU memory in use", "Where the time of the nodes went"),
    ]
    assert empty == 0
    assert outside == []


def test_the_first_screen_answers_what_people_ask(browser, pages):
    with Look(browser, pages["good"]) as look:
        seen = look.value(
            """[...document.querySelectorAll('.answers > div')].filter(one => one.getBoundingClientRect().bottom < 900)
               .map(one => one.innerText.split('\\n').slice(0, 2).join(' '))"""
        )

    assert "How did it end? succeeded" in seen
    assert "Which rank is the slowest? rank 5 on n1" in seen
    assert any(one.startswith("How long did it take?") for one in seen)
    assert any(one.startswith("How much of it counts? goodput") for one in seen)


def test_why_an_attempt_ended_stands_in_the_timeline_and_in_its_table(browser, pages):
    with Look(browser, pages["failed"]) as look:
        words = look.value("document.querySelector('#timeline-plot-t').parentNode.textContent")
        cell = look.value("document.querySelector('tr.bad td.why').textContent")

    assert "SIGKILL in rank 3 on n2" in words
    assert cell == "SIGKILL in rank 3 on n2"


def test_the_keyboard_reaches_everything_and_reads_values(browser, pages):
    with Look(browser, pages["good"]) as look:
        page = look.page
        page.keyboard.press("Tab")
        assert look.value("document.activeElement.textContent") == "Skip to the report"
        page.keyboard.press("Enter")
        assert look.value("document.activeElement.id") == "main"
        page.locator("figure .scroll", has=page.locator("svg[data-x]")).first.focus()
        page.keyboard.press("Home")
        first = page.locator("figure output").first.inner_text()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("End")
        last = page.locator("figure output").first.inner_text()

    assert re.fullmatch(r"step 1: about 3\.?\d* loss", first)
    assert re.fullmatch(r"step 5000: about 0.000\d+ loss|step 5000: about \d.\d+e-4 loss", last)


def test_the_button_changes_the_theme(browser, pages):
    with Look(browser, pages["good"]) as look:

        def background():
            return look.value("getComputedStyle(document.body).backgroundColor")

        light = background()
        button = look.page.get_by_role("button", name="Theme")
        button.click()
        assert background() == light
        button.click()
        assert background() != light
        assert look.violations() == []
        button.click()
        assert background() == light


def test_without_a_script_all_is_there(browser, pages):
    with Look(browser, pages["good"], javascript=False) as look:
        assert look.page.locator("figure svg").count() > 10
        assert not look.page.locator("#theme").is_visible()


def test_print_is_black_on_white_and_leaves_out_what_paper_cannot_do(browser, pages):
    with Look(browser, pages["good"], theme="dark") as look:
        look.page.emulate_media(media="print")

        assert look.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not look.page.locator("nav").is_visible()
        assert look.page.pdf().startswith(b"%PDF")


def test_the_policy_stops_a_script_that_should_get_in(browser, pages, tmp_path):
    page = tmp_path / "x.html"
    text = pages["good"].read_text()
    evil = "<script>document.title='owned'</script><img src='http://127.0.0.1:9/x'>"
    page.write_text(text.replace("<h1>", f"{evil}<h1>"))

    with Look(browser, page) as look:
        assert look.value("document.title") != "owned"
        assert any("Content Security Policy" in line for line in look.said)
