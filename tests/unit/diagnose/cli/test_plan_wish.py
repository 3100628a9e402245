import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.diagnose.cli.plan import plan, read_plan_request
from torchmuster.errors import ManyErrors

GIVEN = ("--params", "1.3e9", "--dtype", "bf16", "--step-time", "470ms", "--split", "15:30:2")
SLOW = (*GIVEN, "--network", "10GbE")


def refused(*words):
    with pytest.raises(ManyErrors) as caught:
        plan.main(list(words), standalone_mode=False)
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
