import json

import pytest
from click.testing import CliRunner

from torchmuster.core import plugs
from torchmuster.diagnose.cli.plan import plan
from torchmuster.errors import UsageError

GIVEN = ("--params", "1.3e9", "--dtype", "bf16", "--step-time", "470ms", "--split", "15:30:2")
SLOW = (*GIVEN, "--network", "10GbE")


def said(*words):
    done = CliRunner().invoke(plan, [*words], catch_exceptions=False)
    return done.output


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
    words = (*SLOW, "--gpus-per-node", "4", "--inside", "nvlink4", "--nodes", "4")
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


def test_full_sharding_moves_more():
    plain, sharded = predicted(*SLOW), predicted(*SLOW, "--fsdp")
    assert (
        sharded["predictions"][-1]["communication_s"] > plain["predictions"][-1]["communication_s"]
    )


def test_accumulation_and_adapters_help():
    first = predicted(*SLOW)["predictions"][-1]["efficiency"]
    accumulated = predicted(*SLOW, "--accumulate", "8")["predictions"][-1]["efficiency"]
    four = ("--gpus-per-node", "4", "--inside", "nvlink4")
    one, all_four = (
        predicted(*SLOW, *four, "--adapters", count)["predictions"][-1] for count in ("1", "4")
    )
    assert first < accumulated
    assert one["efficiency"] < all_four["efficiency"]


def test_the_plot_is_written_as_svg(tmp_path):
    said(*SLOW, "--svg", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_a_plot_that_cant_be_written_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="can't be written"):
        plan.main([*SLOW, "--svg", str(tmp_path / "no" / "plan.svg")], standalone_mode=False)


def test_the_links_with_names_are_listed():
    text = said("--list")
    assert "slingshot200" in text
    assert "nvlink4" in text


def test_names_of_networks_may_be_spelled_in_any_case():
    assert predicted(*GIVEN, "--network", "10gbe") == predicted(*SLOW)
