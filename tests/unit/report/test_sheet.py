"""The network of a page: a table of few nodes, a picture of many."""

import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from kit.records import EVENTS, event, make_run, over, result, start
from torchmuster.report.find import find_story
from torchmuster.report.page import render_page
from torchmuster.report.sheet import rank_lanes_plot, sheet_of
from torchmuster.report.story import NetworkStory, NodePair


def story_of(tmp_path, count):
    pairs = tuple(
        NodePair(source=a, target=b, mb_per_s=100.0 if a else 10.0, latency_us=20.0, why="")
        for a, b in itertools.permutations(range(count), 2)
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
    told = f"{count * (count - 1)} pairs, median 100 MB/s, least 10 MB/s"
    assert told in sheet.pairs.labels.words
    page = render_page(story)
    assert "Rates between nodes" in page
    assert f"The order of the {count} nodes" in page


def test_nodes_of_which_nothing_was_measured_have_no_picture(tmp_path):
    story = story_of(tmp_path, 30)
    story = replace(story, network=replace(story.network, pairs=()))
    assert sheet_of(story).pairs is None


# Lanes over time: every rank or node is where its attempts were, and only what failed by itself has a cross.


def drawn(run):
    sheet = rank_lanes_plot(find_story(run.path), "")
    tree = ET.fromstring(str(sheet.svg).replace(" data-read=1", ""))
    names = [one.text for one in tree.iter("text") if (one.get("class") or "").startswith("name")]
    marked = [one.text for one in tree.iter("text") if one.get("class") == "name strong"]
    titles = [one.text for one in tree.iter("title")]
    crosses = [one for one in tree.iter("path") if one.get("class") == "sign"]
    return sheet, names, marked, titles, crosses


def test_each_rank_has_a_lane_and_who_failed_by_itself_a_cross(tmp_path):
    _, names, marked, titles, crosses = drawn(make_run(tmp_path / "r"))

    assert names == ["rank 0 on n1", "rank 1 on n1", "rank 2 on n2", "rank 3 on n2"]
    assert (marked, len(crosses)) == (["rank 3 on n2"], 1)
    assert "attempt 0 on n2, 8.0 s; rank 3: SIGKILL" in titles
    assert "attempt 0 on n1, 8.0 s" in titles
    assert sum(title.startswith("attempt 1 on ") for title in titles) == 4


def test_of_many_ranks_the_nodes_have_a_lane_first_those_where_something_failed(tmp_path):
    nodes = [{"node": f"n{n}", "host": f"h{n}", "ranks": f"{8 * n}-{8 * n + 7}"} for n in range(64)]
    begun = {**start(1, 0, nodes=nodes), "world_size": 512, "num_nodes": 64}
    events = [
        EVENTS[0],
        begun,
        event(3, "workers_started", attempt=0),
        event(9, "worker_ended", attempt=0, rank=500, node="n62", what="exit code 1", asked=False),
        event(9.1, "attempt_failed", attempt=0, what="exit code 1 in rank 500 on n62", cause={}),
    ]

    sheet, names, marked, _, crosses = drawn(make_run(tmp_path / "r", events=events, training=None))

    assert (len(names), marked, len(crosses)) == (24, ["n62"], 1)
    assert "40 more, where nothing failed, are left out" in sheet.labels.words


def test_nodes_that_cannot_be_read_make_no_lane(tmp_path):
    ranks = {"n1": "all of them", "n2": "9-99999999999"}
    odd = [{"node": name, "host": name, "ranks": text} for name, text in ranks.items()]
    run = make_run(tmp_path / "r", events=[EVENTS[0], start(1, 0, nodes=odd)], training=None)

    _, names, *_ = drawn(run)

    assert len(names) <= 24
