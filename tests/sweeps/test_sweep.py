"""Sweeps on this machine: real members, failures, owners that are killed."""

import contextlib
import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from kit.command import MUSTER, SOURCE, muster_env, run_muster, spawned
from kit.waiting import wait_until

SUM = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--a", type=float)
parser.add_argument("--b", type=float)
given = parser.parse_args()
if given.b == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("b is 1")
print(f"loss={given.a + given.b}")
"""
TELL = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['MUSTER_SWEEP_X']]))"
# Each member waits for a file beside the script; the word in it ends it.
HOLD = """
import os, pathlib
gate = pathlib.Path(__file__).with_name("gate")
with open(gate.with_name(f"pid-{os.getpid()}"), "w"):
    pass
with open(gate) as pipe:
    pipe.read()
"""


@pytest.fixture
def env(tmp_path):
    return muster_env(tmp_path / "home")


def write(folder, text):
    script = folder / "script.py"
    script.write_text(text)
    return script


def status(name, env):
    return json.loads(run_muster("status", name, "--json", env=env).stdout)


def states(name, env):
    return [member["state"] for member in status(name, env)["members"]]


def held(folder):
    return [int(name.removeprefix("pid-")) for name in os.listdir(folder) if name[:4] == "pid-"]


def words_of(pid):
    """Return the command line of a process; nothing for one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def living(folder):
    """Return the processes of a sweep's script: the spawner and its members have its path in their words."""
    script = str(folder / "script.py").encode()
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and script in words_of(pid)]


@pytest.fixture
def holding(tmp_path, env):
    """Return a sweep of four members in two slots that wait for a pipe, its process and its folder."""
    script = write(tmp_path, HOLD)
    os.mkfifo(tmp_path / "gate")
    words = ("--grid", "x=0:4", "--style", "env", "--slots", "2", "--grace", "20s")
    command = [*MUSTER, "sweep", script, *words, "--run-id", "held"]
    with spawned(command, env=env) as owner:
        wait_until(lambda: len(held(tmp_path)) == 2, "two members")
        wait_until(lambda: states("held", env).count("running") == 2, "the record of two members")
        yield owner, tmp_path
        owner.kill()
    wait_until(lambda: not living(tmp_path), "the end of all members")


def let_go(folder):
    """Let members that open the gate from now on end at once: it is a plain file."""
    os.unlink(folder / "gate")
    (folder / "gate").write_text("")


@pytest.mark.short
def test_a_failed_member_runs_again_alone(tmp_path, env):
    script = write(tmp_path, SUM)
    words = ("--grid", "a=1,2", "b=0:2", "--metric", "loss", "--run-id", "sums", "--slots", "2")
    done = run_muster("sweep", script, *words, env=env)
    assert done.returncode == 1
    assert "2 of 4 members of the sweep failed" in done.stderr
    assert "sums.1 (a=1 b=1): rank 0 raised ValueError: b is 1" in done.stderr
    told = status("sums", env)
    assert [m["state"] for m in told["members"]] == ["succeeded", "failed", "succeeded", "failed"]
    assert [m["value"] for m in told["members"]] == [1.0, None, 2.0, None]
    assert told["best"] == 0

    again = run_muster("restart", "sums", env=env)
    assert again.returncode == 0
    told = status("sums", env)
    assert [m["attempt"] for m in told["members"]] == [0, 1, 0, 1]
    assert [m["value"] for m in told["members"]] == [1.0, 2.0, 2.0, 3.0]
    refused = run_muster("restart", "sums", env=env)
    assert "all members of the sweep sums have succeeded" in refused.stderr


@pytest.mark.short
def test_a_member_is_a_run_for_other_commands(tmp_path, env):
    script = write(tmp_path, SUM)
    run_muster("sweep", script, "--grid", "a=3", "b=1", "--run-id", "one", env=env)
    shown = run_muster("status", "one.0", env=env).stdout
    assert "--a 3 --b 1" in shown
    assert "ValueError: b is 1" in shown
    assert "ValueError: b is 1" in run_muster("logs", "one.0", env=env).stdout
    assert run_muster("wait", "one.0", env=env).returncode == 1
    assert "rank 0 raised" in run_muster("explain", "one.0", env=env).stdout
    hint = "hint: muster logs one.0; muster status one\n"
    assert run_muster("logs", "one", env=env).stderr.endswith(hint)
    assert "has no member 7" in run_muster("logs", "one.7", env=env).stderr
    assert "sweep of" in run_muster("ps", env=env).stdout


@pytest.mark.short
def test_a_metric_that_nobody_tells_is_said(tmp_path, env):
    script = write(tmp_path, SUM)
    words = ("--grid", "a=1", "b=0,2", "--metric", "valid_loss", "--run-id", "none")
    done = run_muster("sweep", script, *words, env=env)
    said = "no member has told `valid_loss`: a line `valid_loss=0.5`, run.log, or what a function returns tells it"
    assert done.returncode == 0
    assert said in done.stderr
    assert f"problem  {said}\n" in run_muster("status", "none", env=env).stdout


def test_a_sweep_whose_plan_has_a_removed_field_is_shown(tmp_path, env):
    script = write(tmp_path, SUM)
    run_muster("sweep", script, "--grid", "a=3,4", "b=0", "--run-id", "old", env=env)
    path = tmp_path / "home/runs/old/sweep.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps(plan | {"gpu_bytes": 8 << 30}))

    assert [m["state"] for m in status("old", env)["members"]] == ["succeeded"] * 2
    assert "loss=4.0" in run_muster("logs", "old.1", "--rank", "0", env=env).stdout


@pytest.mark.short
def test_values_reach_the_script_as_they_are(tmp_path, env):
    script = write(tmp_path, TELL)
    grid = 'x="a, b",it\'s,$HOME,""'
    done = run_muster("sweep", script, "--grid", grid, "--run-id", "odd", "--", "{x}!", env=env)
    assert done.returncode == 0
    told = [json.loads(run_muster("logs", f"odd.{n}", env=env).stdout) for n in range(4)]
    assert told == [[[f"{x}!"], x] for x in ("a, b", "it's", "$HOME", "")]


# What the README leaves to its reader.
BEFORE = """
import sys, torch
from torch.nn.functional import mse_loss
train_set = torch.utils.data.TensorDataset(torch.ones(512, 4), torch.ones(512, 1))
Net, rate = lambda: torch.nn.Linear(4, 1), float(sys.argv[sys.argv.index("--lr") + 1])
"""
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=rate)"
STEP = "loss = mse_loss(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()"


def test_the_loop_and_the_sweep_of_the_readme_work_together(tmp_path, env):
    page = (SOURCE.parent / "README.md").read_text()
    loop = re.search(r"```python\n(import torchmuster\.train.*?)```", page, re.DOTALL)[1]
    script = loop.replace("run = ", f"{OPTIMIZER}\nrun = ", 1).replace("...", STEP)
    (tmp_path / "train.py").write_text(BEFORE + script)
    words = shlex.split(re.search(r"muster (sweep train\.py .*)", page)[1], comments=True)
    done = run_muster(*words, "--run-id", "two", "--metric", "loss", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [m["step"] for m in status("two", env)["members"]] == [20] * 6


def test_members_with_several_workers_are_whole_runs(tmp_path, env):
    script = write(tmp_path, "import os, torch\nprint('loss', os.environ['WORLD_SIZE'], sep='=')")
    words = ("--grid", "x=1,2", "--style", "env", "--nproc-per-node", "2", "--slots", "1")
    done = run_muster("sweep", script, *words, "--metric", "loss", "--run-id", "wide", env=env)
    assert done.returncode == 0, done.stderr
    assert [m["value"] for m in status("wide", env)["members"]] == [2.0, 2.0]


@pytest.mark.short
def test_members_die_with_their_owner_and_the_sweep_goes_on(holding, env):
    owner, folder = holding
    owner.kill()
    owner.wait(30)
    wait_until(lambda: not living(folder), "the end of the members")
    assert states("held", env) == ["lost", "lost", "waiting", "waiting"]
    let_go(folder)
    assert run_muster("restart", "held", "--detach", env=env).stdout == "held\n"
    assert run_muster("wait", "held", env=env).returncode == 0
    told = status("held", env)["members"]
    assert [m["state"] for m in told] == ["succeeded"] * 4
    assert [m["attempt"] for m in told] == [1, 1, 0, 0]


@pytest.mark.short
def test_a_cancelled_sweep_leaves_no_process(holding, env):
    owner, folder = holding
    assert "is a process of its sweep" in run_muster("cancel", "held.0", env=env).stderr
    assert run_muster("cancel", "held", env=env).returncode == 0
    assert owner.wait(30) == 128 + signal.SIGTERM
    assert states("held", env) == ["cancelled"] * 4
    assert not living(folder)


@pytest.mark.short
def test_a_killed_spawner_costs_no_member(holding, env):
    owner, folder = holding
    with open(f"/proc/{held(folder)[0]}/stat") as stat:
        spawner = int(stat.read().rpartition(")")[2].split()[1])
    let_go(folder)
    os.kill(spawner, signal.SIGKILL)
    assert owner.wait(60) == 0
    told = status("held", env)["members"]
    assert [m["state"] for m in told] == ["succeeded"] * 4
    assert [m["attempt"] for m in told] == [1, 1, 0, 0]


@pytest.mark.short
def test_nothing_is_made_by_a_dry_run(tmp_path, env):
    script = write(tmp_path, SUM)
    words = ("--grid", "a=1,2", "--dry-run", "--", "--b", "{a} x")
    done = run_muster("sweep", script, *words, env=env)
    assert done.stdout == f"0\t{script} --b '1 x'\n1\t{script} --b '2 x'\n"
    assert not os.path.exists(tmp_path / "home" / "runs")


LOSSES = """
import os, time
x = float(os.environ["MUSTER_SWEEP_X"])
for step in range(1, 41):
    time.sleep(0.05)
    print(f"loss={x + 1 / step}", flush=True)
"""


@pytest.mark.parametrize("rule", ["asha", "median"])
def test_the_worst_end_early_and_their_steps_are_saved(tmp_path, env, rule):
    pytest.importorskip("optuna")
    script = write(tmp_path, LOSSES)
    words = ("--grid", "x=0:8", "--style", "env", "--slots", "2", "--run-id", "early")
    done = run_muster("sweep", script, *words, "--metric", "loss", "--stop", rule, env=env)
    assert done.returncode == 0, done.stderr
    told = status("early", env)
    assert told["best"] == 0
    assert told["members"][0]["state"] == "succeeded"
    stopped = [m["number"] for m in told["members"] if m["state"] == "stopped"]
    logs = [run_muster("logs", f"early.{n}", env=env).stdout for n in stopped]
    assert stopped
    assert all(log.count("loss=") < 40 for log in logs)
    assert "the sweep stopped this member early" in run_muster("status", "early.7", env=env).stdout
    assert run_muster("restart", "early", env=env).returncode == 2  # they count as done


LEAVES = """
import os, sys, subprocess
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
os._exit(0)
"""


@pytest.mark.short
@pytest.mark.parametrize("job", [{}, {"PBS_JOBID": "1"}], ids=["alone", "in a job of PBS"])
def test_what_a_member_leaves_behind_ends_before_the_sweep(tmp_path, env, job):
    script = write(tmp_path, LEAVES)
    words = ("sweep", "--here", script, "--grid", "x=0:3", "--style", "env", "--slots", "1")
    done = run_muster(*words, "--run-id", "left", env={**env, **job})
    assert done.returncode == 0, done.stderr
    pids = [int(run_muster("logs", f"left.{n}", env=env).stdout) for n in range(3)]
    assert not any(b"signal.pause" in words_of(pid) for pid in pids)


TWO_WORKERS = ("--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("words", "of_slot"),
    [
        (("--per-gpu", "2"), ["0", "1", "0", "1"]),
        (("--slots", "3"), ["0", "1", "0"]),
        pytest.param(("--per-gpu", "2", *TWO_WORKERS), ["0,1"] * 2, marks=pytest.mark.lab),
    ],
)
def test_members_see_the_gpus_of_their_slot(tmp_path, words, of_slot):
    env = muster_env(tmp_path / "home", CUDA_VISIBLE_DEVICES="0,1")
    script = write(tmp_path, "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")
    told = ("--grid", "x=0:4", "--style", "env", "--run-id", "g", *words)
    done = run_muster("sweep", script, *told, env=env)

    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "home/runs/g/events.jsonl").read_text().splitlines()
    starts = [e for line in lines if (e := json.loads(line))["event"] == "member_started"]
    for start in starts:
        log = run_muster("logs", f"g.{start['member']}", "--rank", "0", env=env).stdout
        assert log == of_slot[start["slot"]] + "\n"
    assert len(starts) == 4
    assert ("3 slots are more than --per-gpu 1 makes" in done.stderr) == ("--slots" in words)


def test_the_stacks_of_a_member_that_is_one_process_are_shown(tmp_path, env):
    os.mkfifo(tmp_path / "gate")
    script = write(tmp_path, HOLD)
    words = ("sweep", "--run-id", "held", "--slots", "2", "--detach", "--grid", "x=0:2", script)
    assert run_muster(*words, env=env, cwd=tmp_path).returncode == 0
    wait_until(lambda: len(held(tmp_path)) == 2, "both members")
    record = tmp_path / "home/runs/held/members/held.1/events.jsonl"
    wait_until(lambda: "worker_process" in record.read_text(), "its process in the record")

    shown = run_muster("stacks", "held.1", env=env)

    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("rank 0 on ")
    assert f'File "{script}", line 6 in <module>' in shown.stdout
    assert run_muster("cancel", "held", env=env).returncode == 0
