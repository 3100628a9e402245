"""How the values of a member reach its script."""

from kit.values import program, run_plan
from torchmuster.core.files.layout import member_of_id
from torchmuster.core.model import codec
from torchmuster.multirun.sweep import plan as sweep_plan

PROGRAM = program("train.py", args=("--epochs", "3"))


def plan(**more):
    run = run_plan(run_id="s", program=PROGRAM, **more)
    return sweep_plan.SweepPlan(
        run=run, names=("lr", "seed"), members=(("1e-3", "0"), ("1e-4", "1"))
    )


def test_values_are_options_behind_the_script_s_own():
    args = sweep_plan.with_values(PROGRAM, {"lr": "1e-3"}, sweep_plan.ValueStyle.OPTION).args
    assert args == ("--epochs", "3", "--lr", "1e-3")


def test_values_are_words_for_hydra_and_none_in_the_environment():
    assert sweep_plan.with_values(PROGRAM, {"lr": "1"}, sweep_plan.ValueStyle.HYDRA).args[2:] == (
        "lr=1",
    )
    assert (
        sweep_plan.with_values(PROGRAM, {"lr": "1"}, sweep_plan.ValueStyle.ENV).args == PROGRAM.args
    )


def test_a_placeholder_takes_its_value_and_other_braces_stay():
    words = program(args=("out/{lr}-{seed}", "{other}", '{"a": {lr}}', "{lr"))
    args = sweep_plan.with_values(
        words, {"lr": "{seed}", "seed": "7"}, sweep_plan.ValueStyle.OPTION
    ).args
    assert args == ("out/{seed}-7", "{other}", '{"a": {seed}}', "{lr")


def test_a_member_is_a_run_with_its_values_in_the_environment():
    member = plan().member_plan(1)
    assert member.run_id == "s.1"
    assert dict(member.node_setup.environment) == {
        "MUSTER_SWEEP": "s",
        "MUSTER_SWEEP_MEMBER": "1",
        "MUSTER_SWEEP_LR": "1e-4",
        "MUSTER_SWEEP_SEED": "1",
    }


def test_a_plan_is_read_as_it_was_written():
    assert codec.from_plain(sweep_plan.SweepPlan, codec.to_plain(plan())) == plan()


def test_names_of_members_and_variables():
    assert member_of_id("20261121-041805-train-3f2a.12") == ("20261121-041805-train-3f2a", 12)
    assert member_of_id("a.b.3") == ("a.b", 3)
    assert member_of_id("train.py") is None
    assert member_of_id(".3") is None
    assert sweep_plan.variable_of("optimizer.lr") == "MUSTER_SWEEP_OPTIMIZER_LR"


def test_no_number_is_never_better():
    metric = sweep_plan.MetricChoice(name="loss")
    assert not metric.is_better(float("nan"), 1.0)
    assert metric.is_better(1.0, float("nan"))
