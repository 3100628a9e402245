from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from torchmuster.diagnose.cli import plan as view
from torchmuster.diagnose.plan import scaling
from torchmuster.diagnose.plan.scaling import (
    Cluster,
    JobChange,
    Layout,
    NetworkLink,
    Prediction,
    Work,
    predict,
)

WORK = Work(gradient_bytes=2.6e9, forward_s=0.15, backward_s=0.30, optimizer_s=0.02)
CLUSTER = Cluster(per_node=1, between=NetworkLink(latency_s=60e-6, bytes_per_s=1.1e9))
FOUND = [predict(WORK, CLUSTER, count) for count in (1, 2, 16)]


@pytest.mark.parametrize(
    ("seconds", "words"), [(4.784, "4.78 s"), (0.47, "470 ms"), (6e-5, "60 us"), (0.0, "0 us")]
)
def test_times_are_said_in_the_unit_that_suits_them(seconds, words):
    assert scaling.format_seconds(seconds) == words


def test_sizes_are_said_in_decimal_units():
    assert scaling.say_bytes(2.6e9) == "2.6 GB"
    assert scaling.say_bytes(4) == "4 B"
    assert scaling.say_bytes(3e15) == "3e+03 TB"


def test_the_table_has_a_row_for_each_number_of_nodes():
    header, one, two, _ = view.prediction_table(FOUND).splitlines()
    assert header.split()[:3] == ["NODES", "WORKERS", "STEP"]
    assert "470 ms" in one
    assert "1 worker" in one
    assert "18%" in two


def test_bars_are_as_long_as_the_steps():
    *bars, legend = view.prediction_bars(FOUND).splitlines()
    shaded = [line.count("░") for line in bars]
    assert shaded[0] == 0
    assert shaded == sorted(shaded)
    assert all(len(line) <= 3 + view.BAR + 6 for line in bars)
    assert "4.78 s" in legend


def test_the_same_workers_on_fewer_nodes_are_compared():
    few = replace(FOUND[0], num_workers=4)
    layouts = [
        Layout(num_nodes=1, per_node=4, prediction=few),
        Layout(num_nodes=4, per_node=1, prediction=replace(few, step_s=4.7, efficiency=0.1)),
    ]
    verdict, *lines = view.layout_sentences(layouts)
    assert verdict == "the same 4 workers: 1 node is 10 times as fast as 4 nodes"
    assert lines[0] == "  1 node with 4: 470 ms a step, efficiency 100%"
    quick = replace(few, step_s=0.235)
    layouts[1] = replace(layouts[1], prediction=quick)
    verdict, *_ = view.layout_sentences(layouts)
    assert verdict == "the same 4 workers: 4 nodes are 2 times as fast as 1 node"
    assert view.layout_sentences(layouts[:1]) == []


def test_no_difference_is_said_to_be_none():
    layouts = [Layout(num_nodes=n, per_node=4 // n, prediction=FOUND[0]) for n in (1, 4)]
    assert "no difference" in view.layout_sentences(layouts)[0]


def test_changes_are_listed_with_their_gain_and_their_price():
    change = JobChange(what="gradients in bf16", gain=1.9, step_s=2.5, note="rounded")
    lines = view.change_lines([change], 16)
    assert lines[1] == "  1.90 times the work: gradients in bf16, 2.5 s a step (rounded)"
    assert "no change" in view.change_lines([], 16)[0]


def test_the_svg_is_whole_and_holds_every_bar():
    root = ET.fromstring(view.render_svg(FOUND, "a < b & c"))
    bars = [one for one in root.iter() if one.tag.endswith("rect")]
    assert len(bars) == 1 + 2 * len(FOUND)
    assert "a < b & c" in "".join(root.itertext())


def test_all_that_a_step_waits_for_is_one_number():
    one = Prediction(
        num_nodes=2,
        num_workers=2,
        step_s=1.0,
        communication_s=0.5,
        exposed_s=0.1,
        cost_s=0.02,
        skew_s=0.003,
        efficiency=0.9,
    )
    assert view.waits_s(one) == pytest.approx(0.123)
