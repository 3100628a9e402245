"""Sweeps from Python: values of Python into functions, values back, failures, another process."""

import asyncio
import json
import os
from pathlib import Path

import pytest

import torchmuster
from kit.command import run_muster
from kit.waiting import wait_until
from torchmuster.errors import NotFoundError

LIMIT_S = 120.0


def local(**more):
    return {"here": True, "slots": 2, **more}


@pytest.mark.short
def test_each_member_gets_its_values_as_they_are_and_returns_one(project):
    class Net:
        def __init__(self, width):
            self.width = width

        def __repr__(self):
            return f"Net({self.width})"

    offset = 100

    def fit(base, lr, net, seed, *, scale):
        return {"loss": offset + base + scale * lr * seed, "width": net.width, "kind": type(seed)}

    values = {"lr": [0.5, 2], "net": [Net(8)]}
    sweep = torchmuster.sweep(
        fit, values, 1, zip={"seed": range(2)}, scale=10, metric="loss", name="fits", **local()
    )

    found = sweep.results(LIMIT_S)
    assert [one["loss"] for one in found] == [101.0, 106.0, 101, 121]
    assert {(one["width"], one["kind"]) for one in found} == {(8, int)}
    best = sweep.best()
    assert (best.number, best.value, best.state) == (0, 101.0, "succeeded")
    assert best.values == {"lr": 0.5, "net": "Net(8)", "seed": 0}
    assert [member.value for member in sweep.members()] == [101.0, 106.0, 101.0, 121.0]
    assert "Net(8)" in sweep.table()
    assert sweep.run_id.partition("-fits-")[1]
    assert torchmuster.find_sweep("last") == sweep


def test_a_metric_that_no_member_has_told_is_no_best(project):
    def fit(lr):
        return {"loss": lr}

    sweep = torchmuster.sweep(fit, {"lr": [0.1]}, metric="val_loss", **local()).wait(LIMIT_S)

    with pytest.raises(NotFoundError, match="no member has told `val_loss`"):
        sweep.best()


def test_what_failed_is_raised_and_runs_again_alone(project):
    (project / "job.py").write_text(
        "import os, pathlib\n"
        "def train(x):\n"
        "    with open(f'ran-{x}', 'a') as ran:\n"
        "        ran.write('1')\n"
        "    if x == 1 and not pathlib.Path('mended').exists():\n"
        "        raise ValueError('x is 1')\n"
        "    return x * 10\n"
    )
    import job

    sweep = torchmuster.sweep(job.train, {"x": range(3)}, **local())
    with pytest.raises(torchmuster.RunFailed, match="1 of 3 members of the sweep failed") as told:
        sweep.wait(LIMIT_S)
    assert "rank 0 raised ValueError: x is 1" in told.value.why
    assert told.value.state == "failed"
    assert sweep.results(partial=True) == [0, None, 20]
    assert [member.state for member in sweep.members()] == ["succeeded", "failed", "succeeded"]
    with pytest.raises(torchmuster.RunFailed) as of_member:
        sweep.run(1).results()
    assert "x is 1" in of_member.value.traceback

    Path("mended").touch()
    assert sweep.restart().results(LIMIT_S) == [0, 10, 20]
    assert [Path(f"ran-{x}").read_text() for x in range(3)] == ["1", "11", "1"]
    with pytest.raises(torchmuster.NotLaunchedError, match="have succeeded"):
        sweep.restart()


def test_members_with_several_workers_return_a_value_for_each_rank(project):
    def rank(x):
        return x * 10 + int(os.environ["RANK"])

    sweep = torchmuster.sweep(rank, {"x": [1, 2]}, here=True, slots=1, nproc_per_node=2)

    assert sweep.results(LIMIT_S) == [[10, 11], [20, 21]]


def test_a_script_gets_options_and_has_no_values(project):
    (project / "train.py").write_text("import sys; print(sys.argv[1:], 'loss=' + sys.argv[-1])\n")
    values = {"text": ["a, b", "1:3"], "lr": [0.1]}

    sweep = torchmuster.sweep("train.py", values, "--epochs", 3, metric="loss", **local())
    sweep.wait(LIMIT_S)

    assert sweep.run(1).logs() == "['--epochs', '3', '--text', '1:3', '--lr', '0.1'] loss=0.1\n"
    assert sweep.best().value == 0.1
    with pytest.raises(NotFoundError, match="returned no value"):
        sweep.results()


def test_a_rule_ends_the_worst_and_they_have_no_value(project):
    (project / "rules.py").write_text(
        "class Above:\n"
        "    def __init__(self, goal): pass\n"
        "    def report(self, member, step, value): return value > 5\n"
        "    def ended(self, member, completed): pass\n"
    )

    def fit(x):
        import signal

        print(f"loss={x}", flush=True)
        if x > 5:
            signal.pause()
        return x

    sweep = torchmuster.sweep(fit, {"x": [1, 9]}, metric="loss", stop="rules:Above", **local())

    assert sweep.results(LIMIT_S) == [1, None]
    assert [member.state for member in sweep.members()] == ["succeeded", "stopped"]


def test_following_ends_with_the_table_and_an_event_loop_may_wait(project, capsys):
    def work(x):
        return x

    sweep = torchmuster.sweep(work, {"x": [3, 2]}, metric="loss", goal="max", **local())
    assert asyncio.run(sweep.wait_async(LIMIT_S)) == sweep
    assert sweep.follow() == sweep

    said = capsys.readouterr().out
    assert "best so far: loss 3: member 0, x=3" in said
    assert said.count("succeeded") == 2


def test_a_sweep_is_cancelled_with_what_has_not_begun(project):
    def wait(x):
        import signal

        signal.pause()

    sweep = torchmuster.sweep(wait, {"x": range(9)}, grace="1s", **local())
    wait_until(lambda: _states(sweep).count("running") == 2, "two members", LIMIT_S)
    with pytest.raises(TimeoutError):
        sweep.wait(0.01)

    sweep.cancel()

    assert _states(sweep) == ["cancelled"] * 9
    with pytest.raises(torchmuster.RunFailed) as told:
        sweep.wait()
    assert told.value.state == "cancelled"
    with pytest.raises(NotFoundError, match="member 8 has not begun"):
        sweep.run(8)
    assert sweep.state() == "cancelled"


def _states(sweep):
    return [member.state for member in sweep.members()]


@pytest.mark.parametrize(
    ("values", "more", "said"),
    [
        ({}, {}, "a sweep needs values to try"),
        ({"x": "abc"}, {}, "`x` is one value, not several"),
        ({"x": 3}, {}, "`x` is one value, not several"),
        ({"x": []}, {}, "`x` has no values"),
        ({"x": [1]}, {"zip": {"x": [1]}}, "`x` varies in `values` and in `zip`"),
        ({}, {"zip": {"x": [1, 2], "y": [1]}}, "the values of `zip` are of different number"),
        ({"x": range(10**9)}, {}, "a sweep has at most 10,000 members"),
        ({"z": [1]}, {}, "`f` has no parameter `z`"),
        ({"x": [1]}, {"stop": "asha"}, "`--stop` compares members by a metric"),
        ({"x": [1]}, {"detach": True}, "`detach` is no keyword of sweep"),
        ({"x": [1, open]}, {"slots": 0}, "0 is not in the range"),
        ({"x": [os.environ, open(os.devnull)]}, {}, "`x\\[1\\]` is an open file"),  # noqa: SIM115
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_made(project, values, more, said):
    def f(x, y=0):
        del x, y

    with pytest.raises(torchmuster.NotLaunchedError, match=said):
        torchmuster.sweep(f, values, **more)
    assert not list(Path(os.environ["MUSTER_HOME"]).glob("runs/*"))


def test_the_command_line_knows_the_sweep(project):
    def work(x):
        return x

    sweep = torchmuster.sweep(work, {"x": [1, 2]}, run_id="named", **local()).wait(LIMIT_S)

    told = json.loads(run_muster("status", "named", "--json", env=dict(os.environ)).stdout)
    assert [member["values"] for member in told["members"]] == [{"x": "1"}, {"x": "2"}]
    with pytest.raises(NotFoundError, match=r"named\.0 is no sweep"):
        torchmuster.find_sweep("named.0")
    calls = [Path(sweep.path, "call"), Path(sweep.path, "members", "named.0", "call")]
    assert len({call.stat().st_ino for call in calls}) == 1
    assert oct(calls[1].stat().st_mode & 0o777) == "0o600"
