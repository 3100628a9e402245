"""Keywords of `launch` are the options of `muster run`, by construction; what is none is refused with a near miss."""

import functools
from datetime import timedelta

import pytest

from torchmuster.core.cli.run import run as command
from torchmuster.launcher.api import keywords
from torchmuster.launcher.api.failures import NotLaunchedError
from torchmuster.multirun.cli.sweep import sweep as sweep_command


def long_options(of):
    """Return the long options of a command that it shows, as keywords."""
    found = [word for param in of.params if not getattr(param, "hidden", 0) for word in param.opts]
    return {word[2:].replace("-", "_") for word in found if word.startswith("--")}


def test_every_long_option_of_the_command_is_a_keyword_unless_it_is_of_a_terminal():
    long = long_options(command)

    assert long == keywords.options().keys() | keywords._OF_A_TERMINAL.keys()
    assert {"nodes", "nnodes", "nproc_per_node", "on", "hosts", "partition", "queue"} <= long


def test_those_of_sweep_are_the_options_of_its_command():
    ours = long_options(sweep_command) - keywords._OF_A_TERMINAL.keys() - {"grid", "zip"}

    assert ours == keywords.options("sweep").keys()
    assert {"slots", "metric", "stop", "on", "per_gpu"} <= ours


NO_PARAMETER = "`train` has no parameter"


@pytest.mark.parametrize(
    ("member", "given", "said"),
    [
        ({"lrr": 1}, {}, f"{NO_PARAMETER} `lrr`, which is to vary\n.*\n.*did you mean `lr`"),
        ({"lr": 1}, {"lr": 2}, "`lr` varies, and is given as a keyword too"),
        ({"lr": 1}, {"slotz": 2}, "neither sweep nor `train` has a parameter `slotz`"),
        ({"lr": 1}, {"metric": "x"}, "`metric` is a keyword of sweep, and `train` has"),
        ({}, {}, "`train` can't be called so: missing a required argument: 'lr'"),
    ],
)
def test_what_varies_fits_the_function(member, given, said):
    def train(lr, metric=None):
        del lr, metric

    with pytest.raises(NotLaunchedError, match=said):
        keywords.split(given, train, (), "train", of="sweep", member=member)


def test_values_become_the_words_of_the_command_line():
    given = {
        "nodes": 2,
        "nproc_per_node": [4, 2],
        "grow": True,
        "debug": False,
        "account": None,
        "preload": ["numpy", "scipy"],
        "partition": "gpu",
        "time": timedelta(hours=2),
        "ship_env": True,
        "env": {"A": "1"},
    }

    assert keywords.words(given) == [
        *("--nodes=2", "--nproc-per-node=4,2", "--grow", "--preload=numpy", "--preload=scipy"),
        *("--queue=gpu", "--time=7200s", "--ship-env="),
    ]
    assert keywords.environment(given) == {"A": "1"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"grow": 1}, "`grow` is True or False, not 1"),
        ({"nodes": True}, "`nodes` is a value, not True"),
    ],
)
def test_a_flag_is_a_flag(given, said):
    with pytest.raises(NotLaunchedError, match=said):
        keywords.words(given)


def test_variables_are_a_mapping():
    with pytest.raises(NotLaunchedError, match="mapping"):
        keywords.environment({"env": ["A=1"]})


def train(lr, *, steps=1):
    """Train."""


def train_any(**config):
    """Train."""


@pytest.mark.parametrize(
    ("given", "function", "args", "theirs"),
    [({"steps": 3}, train, [0.1], {"steps": 3}), ({"model": 1}, train_any, [], {"model": 1})],
    ids=["to its parameter", "to one that takes any keyword"],
)
def test_what_is_no_option_goes_to_the_function(given, function, args, theirs):
    found = keywords.split({"nodes": 2, **given}, function, args, "train")

    assert found == ({"nodes": 2}, theirs)


def test_a_typo_gets_a_near_miss_of_both_sides():
    def train(learning_rate):
        """Train."""

    with pytest.raises(NotLaunchedError) as told:
        keywords.split({"nodse": 2, "learning_rat": 1}, train, [], "train")

    what = "neither launch nor `train` has a parameter"
    assert [(e.what, e.fix) for e in (told.value, *told.value.others)] == [
        (f"{what} `nodse`", "did you mean `nodes`?"),
        (f"{what} `learning_rat`", "did you mean `learning_rate`?"),
    ]


def test_a_removed_option_says_what_to_use_instead():
    with pytest.raises(NotLaunchedError) as refused:
        keywords.check({"gpu_mem": "8Gi"}, "a script", "sweep")

    assert refused.value.what == "the keyword `gpu_mem` of sweep was removed"
    assert "`--per-gpu K`" in refused.value.fix


def test_a_parameter_with_the_name_of_an_option_is_refused_and_a_partial_passes_it():
    def train(name):
        """Train."""

    with pytest.raises(NotLaunchedError, match="`name` is a keyword of launch") as told:
        keywords.split({"name": "x"}, train, [], "train")

    assert "functools.partial(train, name=...)" in told.value.fix
    assert keywords.split({}, functools.partial(train, name="x"), [], "train") == ({}, {})


@pytest.mark.parametrize("name", sorted(keywords._OF_A_TERMINAL))
def test_an_option_of_a_terminal_says_what_to_do_instead(name):
    with pytest.raises(NotLaunchedError, match=f"`{name}` is no keyword of launch"):
        keywords.check({name: True}, "a script")
