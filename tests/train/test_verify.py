"""`--verify-every`: a rank that computes wrongly is found, its node left out, and the weights are as if it had not been."""

import pytest
from torch import nn, optim

from torchmuster.errors import UsageError
from train.launching import HERE, events_in, muster

SCRIPT = HERE / "verify_script.py"


def train(tmp_path, *words, nodes=3, options=(), check=True, every=1):
    """Train, verifying each step; return how it ended, and the events of the head and of rank 0."""
    home, out = tmp_path / "home", tmp_path / "out"
    out.mkdir(exist_ok=True)
    more = ("--verify-every", every, *options)
    ended = muster(home, 1, *more, SCRIPT, out, *words, nodes=nodes, restarts=2, check=check)
    (run,) = (home / "runs").iterdir()
    record = run / "training.jsonl"
    return ended, events_in(run / "events.jsonl"), events_in(record) if record.exists() else []


def named(events, name):
    return [event for event in events if event["event"] == name]


def weights(tmp_path):
    """Return the digest of each rank's weights and buffers; running means are each rank's own."""
    return [path.read_text() for path in sorted((tmp_path / "out").glob("weights-*"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the final weights of a run in which nothing is wrong, and nothing is verified."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "out").mkdir()
    muster(folder / "home", 1, SCRIPT, folder / "out", "plain", nodes=3)
    return weights(folder)


@pytest.mark.parametrize(
    "model",
    [
        *("plain", "two", "amp", "accumulate", "inplace", "sliced"),
        *(pytest.param(model, marks=pytest.mark.lab) for model in ("attention", "numbers")),
    ],
)
def test_steps_made_again_on_other_ranks_are_the_same(tmp_path, model, undisturbed):
    ended, events, training = train(tmp_path, model)
    assert [event["step"] for event in named(training, "verified")] == list(range(1, 21))
    assert "step 1: made again on other ranks, bit for bit the same" in ended.stderr
    assert not named(events, "node_left_out")
    if model == "plain":
        assert weights(tmp_path) == undisturbed, "it changes nothing"


@pytest.mark.parametrize(
    "kind", ["forward", "backward", pytest.param("weights", marks=pytest.mark.lab)]
)
@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.lab)])
def test_the_node_of_a_rank_that_is_wrong_is_left_out_and_nothing_is_lost(
    tmp_path, kind, every, undisturbed
):
    spare = ("--spares", 1)
    _, events, training = train(tmp_path, "plain", kind, 1, 6, options=spare, every=every)
    assert [(e["node"], e["rank"]) for e in named(events, "node_left_out")] == [("n2", 1)]
    assert [e["node"] for e in named(events, "spare_taken")] == ["n4"]
    (differs,) = named(training, "differs")
    assert (differs["step"], differs["rank"]) == (6, 1)
    assert weights(tmp_path) == undisturbed


def test_a_bit_in_the_first_of_two_micro_batches_is_found(tmp_path):
    _, events, _ = train(tmp_path, "accumulate", "backward", 1, 6, options=("--spares", 1))
    assert [(e["node"], e["rank"]) for e in named(events, "node_left_out")] == [("n2", 1)]


def test_a_run_ends_where_no_node_can_take_the_place(tmp_path):
    ended, events, _ = train(tmp_path, "plain", "forward", 1, 5, "always", check=False)
    assert ended.returncode == 1
    assert [e["rank"] for e in named(events, "node_left_out")] == [1]
    assert "rank 1 has computed something else than the others in step 5" in ended.stderr
    assert "rank 1 differs each time" in ended.stderr
    assert "n2 gets no ranks again, and the run can't go on without it" in ended.stderr
    assert len(named(events, "attempt_started")) == 1


def test_of_two_ranks_nobody_is_blamed_that_keeps_differing(tmp_path):
    ended, events, training = train(
        tmp_path, "plain", "forward", 1, 5, "always", nodes=2, check=False
    )
    assert ended.returncode == 1
    assert not named(events, "node_left_out")
    assert named(training, "differs")[0]["rank"] is None
    assert "nobody can tell which is right" in ended.stderr


def test_of_two_ranks_the_one_that_was_wrong_once_is_named(tmp_path):
    _, events, _ = train(tmp_path, "plain", "forward", 1, 6, nodes=2, options=("--spares", 1))
    assert [e["node"] for e in named(events, "node_left_out")] == ["n2"]


def test_a_world_of_one_is_told_that_nothing_is_compared(world, capsys):
    model = world.wrap(nn.Linear(3, 1))
    world.resume(model=model, optimizer=optim.SGD(model.parameters()), verify_every=2)
    assert "there is one rank, so its steps are compared with nothing" in capsys.readouterr().err


def test_less_than_one_is_refused(world):
    model = world.wrap(nn.Linear(3, 1))
    with pytest.raises(UsageError, match="verify_every is 0, below one"):
        world.resume(model=model, optimizer=optim.SGD(model.parameters()), verify_every=0)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("bare", "`model` is not wrapped"),
        ("sharded", "verify_every needs models of which each rank has the whole"),
        ("lone", "verify_every needs model= and optimizer="),
        ("odd-input", "a value of type `__main__.Thing` can't be saved"),
    ],
)
def test_what_can_not_be_verified_is_refused_once_with_a_reason(tmp_path, model, says):
    ended, events, _ = train(tmp_path, model, check=False)
    assert ended.returncode == 1, ended.stderr
    assert says in ended.stderr
    assert len(named(events, "attempt_started")) == 1
    assert "Traceback" not in ended.stderr


def test_a_script_that_verifies_nothing_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('trained')\n")
    ended = muster(tmp_path / "home", 2, "--verify-every", 5, script)
    assert "no step was verified: `--verify-every 5` is for scripts" in ended.stderr
    ended = muster(tmp_path / "home", 2, "--verify-every", 50, SCRIPT, tmp_path, "plain")
    assert "no step was verified: the last one was 20, and" in ended.stderr
