import json
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.command import call
from torchmuster.core import plugs
from torchmuster.diagnose.cli import plan as view
from torchmuster.diagnose.cli.plan import plan, read_plan_request
from torchmuster.diagnose.plan import scaling
from torchmuster.diagnose.plan.scaling import (
    JobChange,
    Layout,
    predict,
)
from torchmuster.errors import ManyErrors, UsageError
from unit.diagnose.plan.test_scaling import WORK, on

GIVEN = ("--params", "1.3e9", "--dtype", "bf16", "--step-time", "470ms", "--split", "15:30:2")
SLOW = (*GIVEN, "--network", "10GbE")
FOUR_GPUS = ("--gpus-per-node", "4", "--inside", "nvlink4")


def said(*words):
    return call(plan, *words).output


def predicted(*words):
    return json.loads(said(*words, "--json"))


def test_plan_is_a_command():
    assert plugs.table("commands")["plan"][2] == "diagnose.cli.plan:plan"


def test_the_worked_example_scales_at_10_percent_on_10_gbe():
    last = predicted(*SLOW)["predictions"][-1]
    assert last["num_nodes"] == 16
    assert last["efficiency"] == pytest.approx(0.098, abs=0.001)
    text = said(*SLOW)
    assert "4.78 s" in text
    assert "what would help most on 16 nodes" in text
    assert "░" in text


def test_four_gpus_on_one_machine_are_compared_with_four_machines():
    words = (*SLOW, *FOUR_GPUS, "--nodes", "4")
    places = predicted(*words)["same_workers"]
    assert [place["num_nodes"] for place in places] == [1, 2, 4]
    assert "the same 4 workers: 1 node is 7.9" in said(*words)


def test_given_numbers_do_what_a_name_does():
    given = predicted(*GIVEN, "--network", "1.1GB/s,60us")
    assert "given, not measured" in given["facts"][1]
    assert given["predictions"] == predicted(*SLOW)["predictions"]


def test_every_number_of_nodes_up_to_eight_is_shown_then_powers_of_two():
    few = predicted(*SLOW, "--nodes", "5")["predictions"]
    many = predicted(*SLOW, "--nodes", "48")["predictions"]
    assert [one["num_nodes"] for one in few] == [1, 2, 3, 4, 5]
    assert [one["num_nodes"] for one in many] == [1, 2, 4, 8, 16, 32, 48]


@pytest.mark.parametrize(
    ("words", "more", "value"),
    [
        ((), ("--fsdp",), "communication_s"),
        ((), ("--accumulate", "8"), "efficiency"),
        ((*FOUR_GPUS, "--adapters", "1"), ("--adapters", "4"), "efficiency"),
    ],
    ids=["full sharding moves more", "accumulation helps", "adapters help"],
)
def test_what_a_word_changes_is_predicted(words, more, value):
    one, other = (predicted(*SLOW, *words, *added)["predictions"][-1] for added in ((), more))
    assert one[value] < other[value]


def test_the_plot_is_written_as_svg(tmp_path):
    said(*SLOW, "--svg", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_a_plot_that_cant_be_written_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="can't be written"):
        said(*SLOW, "--svg", str(tmp_path / "no" / "plan.svg"))


def test_the_links_with_names_are_listed():
    text = said("--list")
    assert "slingshot200" in text
    assert "nvlink4" in text


def test_names_of_networks_may_be_spelled_in_any_case():
    assert predicted(*GIVEN, "--network", "10gbe") == predicted(*SLOW)


FOUND = [predict(WORK, on(1.1e9, 60e-6), count) for count in (1, 2, 16)]


@pytest.mark.parametrize(
    ("seconds", "words"), [(4.784, "4.78 s"), (0.47, "470 ms"), (6e-5, "60 us"), (0.0, "0 us")]
)
def test_times_are_said_in_the_unit_that_suits_them(seconds, words):
    assert scaling.format_seconds(seconds) == words


def test_sizes_are_said_in_decimal_units():
    said = [scaling.say_bytes(size) for size in (2.6e9, 4, 3e15)]
    assert said == ["2.6 GB", "4 B", "3e+03 TB"]


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
    one = replace(FOUND[1], exposed_s=0.1, cost_s=0.02, skew_s=0.003)
    assert view.waits_s(one) == pytest.approx(0.123)


def refused(*words):
    with pytest.raises(ManyErrors) as caught:
        call(plan, *words)
    return caught.value.errors


def test_all_problems_are_told_at_once():
    words = ("--params", "x", "--network", "25GB", "--split", "1", "--gpus-per-node", "2")
    wheres = [error.where for error in refused(*words)]
    assert wheres == ["--params", "--split", "--network", None, "--gpus-per-node"]


def test_a_near_miss_of_a_network_is_suggested():
    (error,) = refused(*GIVEN, "--network", "slingshot20")
    assert error.fix == "did you mean `slingshot200`?"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "the model is not known: --params and --step-time missing"),
        (GIVEN, "the network is not known"),
        ((*SLOW, "train.py"), "unexpected argument: `train.py`"),
        (("--network", "10GbE", "--script"), "--script needs a script after it"),
        (("--network", "10GbE", "--script", "no.py"), "there is no script `no.py`"),
        ((*SLOW, "--script", "no.py"), "--script measures what --params gives"),
        ((*GIVEN, "--on", "local"), "a network is measured between two nodes or more"),
        ((*SLOW, "--on", "local", "--nodes", "2"), "--on measures what --network gives"),
        (("--params", "0", *SLOW[2:]), "`0` is not a valid number of parameters"),
        ((*SLOW[:5], "0s", *SLOW[6:]), "`0s` is not a valid duration"),
        ((*SLOW, "--split", "1:0"), "`1:0` does not split a step"),
        ((*SLOW, "--split", "nan:1"), "`nan:1` does not split a step"),
    ],
)
def test_what_cant_be_done_is_refused(words, what):
    assert what in [error.what for error in refused(*words)]


def wished(*words):
    context = plan.make_context("plan", [*words])
    return read_plan_request(context.params)


@pytest.mark.parametrize(
    ("text", "count"), [("7e9", 7e9), ("7B", 7e9), ("350M", 350e6), ("1.5 k", 1500), ("1T", 1e12)]
)
def test_parameters_are_counted_as_people_do(text, count):
    assert wished("--params", text, *SLOW[2:]).num_params == count


@given(st.lists(st.floats(0.01, 1000), min_size=2, max_size=3))
def test_the_parts_of_a_step_make_it_whole(parts):
    text = ":".join(f"{part:.6f}" for part in parts)
    wish = wished(*SLOW[:6], "--split", text, *SLOW[8:])
    assert sum(wish.split) == pytest.approx(1.0)
    assert wish.split[1] == pytest.approx(parts[1] / sum(parts), rel=1e-3)


def test_two_thirds_of_a_step_are_the_backward_pass_unless_said():
    wish = wished(*SLOW[:6], "--network", "10GbE")
    assert wish.split == pytest.approx((1 / 3, 2 / 3, 0.0))
