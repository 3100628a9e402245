"""The network of a page: a table of few nodes, a picture of many."""

from dataclasses import replace

import pytest

from kit.records import make_run, over, result
from torchmuster.report.find import find_story
from torchmuster.report.page import render_page
from torchmuster.report.sheet import sheet_of
from torchmuster.report.story import NetworkStory, NodePair


def story_of(tmp_path, count):
    pairs = tuple(
        NodePair(source=a, target=b, mb_per_s=100.0 if a else 10.0, latency_us=20.0, why="")
        for a in range(count)
        for b in range(count)
        if a != b
    )
    made = make_run(tmp_path / "r", events=[over(0, "failed")], ended=result())
    network = NetworkStory(sentence="eth0", nodes=tuple(f"n{n}" for n in range(count)), pairs=pairs)
    return replace(find_story(made.path), network=network)


@pytest.mark.parametrize("count", [4, 24])
def test_few_nodes_are_a_table(tmp_path, count):
    sheet = sheet_of(story_of(tmp_path, count))
    assert (len(sheet.matrix), sheet.pairs) == (count, None)


@pytest.mark.parametrize("count", [25, 300])
def test_many_nodes_are_a_picture(tmp_path, count):
    story = story_of(tmp_path, count)
    sheet = sheet_of(story)
    assert sheet.matrix == ()
    assert (
        f"{count * (count - 1)} pairs, median 100 MB/s, least 10 MB/s" in sheet.pairs.labels.words
    )
    page = render_page(story)
    assert "Rates between nodes" in page
    assert f"The order of the {count} nodes" in page


def test_nodes_of_which_nothing_was_measured_have_no_picture(tmp_path):
    story = story_of(tmp_path, 30)
    story = replace(story, network=replace(story.network, pairs=()))
    assert sheet_of(story).pairs is None
