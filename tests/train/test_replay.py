"""`muster replay`: a step of N ranks is made again, bit for bit, and looked into."""

import contextlib
import json
import os
import random
import shutil
import subprocess

import pytest

from kit.command import MUSTER, muster_env
from kit.screen import TerminalOf
from launching import HERE, muster, run

SCRIPT = HERE / "replay_script.py"
# `make chaos` makes 100 of them; `make test` a few.
SEEDS = range(int(os.environ.get("MUSTER_REPLAYS", "3")))
NUM_STEPS = 12
LIMIT_S = 120.0
PLACES = ("forward", "loss", "backward", "augmentation")
KINDS = ("nan", "exception", "inf")


def run_dirs(home):
    return sorted((home / "runs").iterdir(), key=lambda path: (path / "plan.json").stat().st_mtime)


def trained(home, num_workers, *words):
    """Train, well or not; return the run directory."""
    muster(home, num_workers, SCRIPT, *words, check=False)
    return run_dirs(home)[0]


def replay(home, *words, check=False):
    """Replay a step without a terminal; return how it ended, and its run directory."""
    line = [*MUSTER, "replay", *words]
    ended = run(line, muster_env(home, MUSTER_ON="local"), check=check)
    return ended, run_dirs(home)[-1]


def steps(folder, rank):
    """Return what a rank has written of each step: a list of lines."""
    found = {}
    for line in (folder / f"steps-{rank}.jsonl").read_text().splitlines():
        said = json.loads(line)
        found.setdefault(said.pop("step"), []).append(said)
    return found


def assert_made_alike(first, again, step, ranks, *, whole=None):
    """Hold all that the replay has made against the run, bit for bit; `whole` ranks came as far in both."""
    for rank in ranks:
        of_run, of_replay = steps(first, rank), steps(again, rank)
        assert max(of_replay, default=step) in (step - 1, step)
        for number, lines in of_replay.items():
            assert lines == of_run[number][: len(lines)], f"rank {rank}, step {number}"
        if whole is None or rank in whole:
            num_made, num_done = len(of_replay.get(step, ())), len(of_run.get(step, ()))
            assert num_made >= min(num_done, 3), f"rank {rank} came less far"


@pytest.mark.parametrize("seed", [pytest.param(SEEDS[0], marks=pytest.mark.short), *SEEDS[1:]])
def test_a_step_that_failed_is_made_again_bit_for_bit(seed, tmp_path):
    draw = random.Random(seed)
    world_size, kind = 1 + seed % 4, KINDS[seed % len(KINDS)]
    place, step = draw.choice(PLACES), draw.randint(1, NUM_STEPS)
    rank, on_nan = draw.randrange(world_size), draw.choice(["stop", "replay", "skip", "ignore"])
    words = ["--kind", kind, "--place", place, "--step", step, "--rank", rank, "--on-nan", on_nan]
    words += ["--every", draw.randint(1, 5), "--keep", 20, "--workers", draw.choice([0, 0, 1])]
    nodes = 2 if world_size % 2 == 0 and draw.random() < 0.5 else 1
    ended = muster(tmp_path, world_size // nodes, SCRIPT, *words, nodes=nodes, check=False)
    first = run_dirs(tmp_path)[0]
    fails = kind == "exception" or on_nan in ("stop", "replay")
    assert (ended.returncode != 0) is fails, ended.stderr

    more = [] if fails else ["--step", step, "--rank", rank]
    said, again = replay(tmp_path, first.name, *more)
    assert said.returncode == 1, said.stderr
    assert f"step {step} of" in said.stderr
    if kind != "exception" and on_nan == "replay":
        assert f"from the snapshot of step {step - 1}, " in said.stderr, "it was saved at the end"
    assert f"looking into rank {rank}" in said.stderr or place in ("loss", "backward"), said.stderr
    # Of an exception the others learn at different moments: they are ended, or lose a connection.
    whole = [rank] if kind == "exception" else range(world_size)
    assert_made_alike(first, again, step, range(world_size), whole=whole)
    if kind == "exception":
        assert f"this {place} is unhappy with" in said.stderr
        words = next(
            w for w in ended.stderr.splitlines() if "is unhappy with" in w and "Error" in w
        )
        assert words.split("with")[-1].strip() in said.stderr
    else:
        assert f"the gradients of step {step} are not finite" in said.stderr
        noted = "those of the run, bit for bit" in said.stderr
        assert noted is (on_nan != "ignore"), said.stderr


@pytest.mark.lab
def test_a_step_behind_a_change_of_the_world_is_made_by_the_world_that_made_it(tmp_path):
    """Its snapshot is that of two ranks: three have seeded their generators anew, and do so again."""
    shared = ["--snapshots", tmp_path / "shared", "--keep", 9]
    muster(tmp_path, 2, SCRIPT, *shared, "--kind", "exception", "--step", 5, check=False)
    words = [*shared, "--kind", "exception", "--step", 8, "--rank", 2]
    muster(tmp_path, 3, SCRIPT, *words, check=False)
    first = run_dirs(tmp_path)[1]
    said, again = replay(tmp_path, first.name, "--step", 5, check=True)
    assert "from the snapshot of step 3, 3 ranks" in said.stderr
    assert "the world had 2 workers when it was saved, now it has 3" in said.stderr
    assert_made_alike(first, again, 5, range(3))


@pytest.mark.parametrize("step", [6, 7])
def test_the_boundary_is_saved_also_at_the_end_of_an_epoch(step, tmp_path):
    words = ("--step", step, "--rank", 1, "--every", 100)
    first = trained(tmp_path, 2, *words)
    said, again = replay(tmp_path, first.name)
    assert f"from the snapshot of step {step - 1}, 2 ranks" in said.stderr
    assert "the gradients of all ranks are those of the run, bit for bit" in said.stderr
    assert_made_alike(first, again, step, range(2))


@pytest.mark.parametrize("kind", ["nan", "exception"])
def test_a_step_of_a_sharded_model_is_made_again(kind, tmp_path):
    words = ("--sharded", "--kind", kind, "--step", 8, "--rank", 2)
    first = trained(tmp_path, 3, *words)
    said, again = replay(tmp_path, first.name)
    whole = [2] if kind == "exception" else range(3)
    assert_made_alike(first, again, 8, range(3), whole=whole)
    if kind == "nan":
        assert "rank 2: `mul` at " in said.stderr
        assert "the gradients of all ranks are those of the run, bit for bit" in said.stderr


@contextlib.contextmanager
def debugging(home, *words):
    """Replay a step on a terminal, up to the debugger's prompt; at the end, leave the debugger, and so the replay."""
    line = [*MUSTER, "replay", *map(str, words)]
    env = muster_env(home, MUSTER_ON="local", TERM="xterm")
    with TerminalOf(line, env, columns=160, rows=60) as screen:
        screen.wait_for("(Pdb)", limit_s=LIMIT_S)
        yield screen
        screen.press("q\n")
        assert screen.wait_for_end(limit_s=LIMIT_S) == 1


def test_the_debugger_stops_at_the_first_nan_and_goes_on_to_the_end(tmp_path):
    """A NaN that a script masks stops too, and `c` is the answer."""
    muster(tmp_path, 2, SCRIPT, "--step", 5, "--rank", 1, "--on-nan", "ignore", "--keep", 9)
    with debugging(tmp_path, "last", "--step", 5, "--rank", 1) as screen:
        assert "rank 1 on n1 has stopped" in screen.text
        assert "in module `model` has made NaN" in screen.text
        screen.press("p 1000 + value.shape[1]\n")
        screen.wait_for("1024", limit_s=LIMIT_S)
        screen.press("c\n")
        screen.wait_for("has failed; all ranks wait", limit_s=LIMIT_S)
        screen.wait_for("NotFiniteError: the gradients of step 5 are not finite", limit_s=LIMIT_S)


def test_who_leaves_the_debugger_ends_the_replay(tmp_path):
    muster(tmp_path, 1, SCRIPT, "--step", 2, "--on-nan", "ignore", "--keep", 9)
    with debugging(tmp_path, "last", "--step", 2) as screen:
        pass
    assert "the debugger was left, so the replay ends here" in screen.text


@pytest.mark.lab
def test_the_debugger_stops_in_a_backward_pass_that_makes_nan(tmp_path):
    words = ("--step", 4, "--place", "backward", "--on-nan", "ignore", "--keep", 9)
    muster(tmp_path, 2, SCRIPT, *words)
    with debugging(tmp_path, "last", "--step", 4) as screen:
        assert "has failed; all ranks wait" in screen.text
        assert "Function 'BackwardBackward' returned nan values" in screen.text


def test_the_debugger_stops_at_an_exception_with_the_values_of_the_run(tmp_path):
    words = ("--step", 3, "--rank", 1, "--kind", "exception", "--place", "loss")
    ended = muster(tmp_path, 2, SCRIPT, *words, check=False)
    value = ended.stderr.partition("is unhappy with ")[2].split()[0]
    with debugging(tmp_path, "last") as screen:
        screen.press("p value.double().item().hex()\n")
        screen.wait_for(f"'{value}'", limit_s=LIMIT_S)


def test_a_step_in_which_nothing_fails_is_said_to_be_one(tmp_path):
    muster(tmp_path, 2, SCRIPT, "--keep", 9)
    first = run_dirs(tmp_path)[0]
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    said, again = replay(tmp_path, first.name, "--step", 8, check=True)
    assert "step 8 was made again, and nothing failed" in said.stderr
    assert "snapshot" not in said.stderr.rpartition("nothing failed")[2]
    assert_made_alike(first, again, 8, range(2))
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    assert not list((again / "snapshots").glob("step-*"))


def test_weights_that_were_not_finite_before_lead_to_the_step_that_made_them_so(tmp_path):
    muster(tmp_path, 2, SCRIPT, "--step", 5, "--on-nan", "ignore", "--every", 4, "--keep", 9)
    said, _ = replay(tmp_path, "last", "--step", 7)
    assert "error: the weights are not finite at the beginning of step 7" in said.stderr
    assert "the gradients of step 5 were the first that were not" in said.stderr
    assert "--step 5`" in said.stderr
    first = run_dirs(tmp_path)[0]
    said, _ = replay(tmp_path, first.name, "--step", 9)
    assert "they are not in the snapshot of step 8" in said.stderr


def test_a_step_that_the_script_does_not_reach_is_said(tmp_path):
    muster(tmp_path, 1, SCRIPT, "--epochs", 1, "--keep", 9)
    first = run_dirs(tmp_path)[0]
    record = first / "training.jsonl"
    lines = [line for line in record.read_text().splitlines() if '"finished"' not in line]
    record.write_text("".join(f"{line}\n" for line in lines))
    said, _ = replay(tmp_path, first.name, "--step", 9)
    assert said.returncode == 1, said.stderr
    assert "the run ends after step 6: there is no step 9" in said.stderr


def test_a_damaged_snapshot_is_passed_over_and_stays(tmp_path):
    muster(tmp_path, 2, SCRIPT, "--every", 2, "--keep", 9)
    first = run_dirs(tmp_path)[0]
    data = first / "snapshots" / "step-000000006" / "data-00000.bin"
    raw = bytearray(data.read_bytes())
    raw[100] ^= 1
    data.write_bytes(raw)
    said, again = replay(tmp_path, first.name, "--step", 8, check=True)
    assert "snapshot step-000000006 is damaged" in said.stderr
    assert "resuming after step 4" in said.stderr
    assert_made_alike(first, again, 8, range(2))
    assert data.exists()


def test_a_nan_that_a_machine_has_made_once_is_tried_again_from_the_snapshot(tmp_path):
    quiet, ill = tmp_path / "quiet", tmp_path / "ill"
    muster(quiet, 2, SCRIPT)
    words = ("--kind", "once", "--step", 5, "--rank", 1, "--keep", 9)
    ended = muster(ill, 2, SCRIPT, *words, restarts=1)
    assert "because: the model's output was not finite on rank 1" in ended.stderr
    assert "random numbers it is finite on rank 1 (" in ended.stderr
    assert "resuming after step 4 " in ended.stderr, "the boundary before the step was saved"
    ours, theirs = run_dirs(quiet)[0], run_dirs(ill)[0]
    assert steps(theirs, 1)[NUM_STEPS] == steps(ours, 1)[NUM_STEPS], "as if nothing had happened"
    said, _ = replay(ill, "last", check=True)
    assert "its gradients are finite; in the run they were not" in said.stderr


def test_the_code_of_then_is_run_from_another_folder(tmp_path):
    then, now = tmp_path / "then", tmp_path / "now"
    for folder in (then, now):
        folder.mkdir()
        shutil.copy(SCRIPT, folder / "train.py")
    line = [*MUSTER, "run", "--nproc-per-node", "2", "--max-restarts", "0", "train.py"]
    line += ["--step", "4", "--kind", "exception", "--rank", "1"]
    env = muster_env(tmp_path, MUSTER_ON="local")
    subprocess.run(line, cwd=now, env=env, capture_output=True, timeout=LIMIT_S)
    first = run_dirs(tmp_path)[0]
    (now / "train.py").write_text("raise SystemExit('other code')\n")
    said, _ = replay(tmp_path, first.name)
    assert (said.returncode, len(run_dirs(tmp_path))) == (2, 1), said.stderr
    assert "error: the code has changed since the run: train.py" in said.stderr
    said, again = replay(tmp_path, first.name, "--code", then)
    assert_made_alike(first, again, 4, range(2), whole=[1])
    assert "the exception is that of the run, word for word" in said.stderr
    said, _ = replay(tmp_path, first.name, "--changed-code")
    assert "in the run the step ended otherwise, with ValueError: this forward is unhappy" in (
        said.stderr
    )
