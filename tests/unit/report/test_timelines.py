"""Lanes over time: every rank or node is where its attempts were, and only what failed by itself has a cross."""

import xml.etree.ElementTree as ET

from kit.records import EVENTS, event, make_run, start
from torchmuster.report.find import find_story
from torchmuster.report.sheet import rank_lanes_plot


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
    odd = [
        {"node": "n1", "host": "h1", "ranks": "all of them"},
        {"node": "n2", "host": "h2", "ranks": "9-99999999999"},
    ]
    run = make_run(tmp_path / "r", events=[EVENTS[0], start(1, 0, nodes=odd)], training=None)

    _, names, *_ = drawn(run)

    assert len(names) <= 24
