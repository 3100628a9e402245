"""`muster top` on a terminal, beside a real run: what its screen shows, and that the terminal is given back."""

import json
import os
import shutil

import pytest

from kit.command import MUSTER, muster_env, run_muster
from kit.odd_records import ODD
from kit.screen import TerminalOf

# Two ranks; the second is slow, once the first is killed.
SCRIPT = """
import os, signal, time
import torch
import torchmuster.train as tm

world = tm.init(seed=1)

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.009 if world.rank else 0.003)
        return torch.full((4,), float(index % 7))

model = tm.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
data = tm.loader(Numbers(), global_batch_size=4, shuffle=True)
run = tm.resume(model=model, optimizer=optimizer, data=data, every_steps=50, log_every=10)
for epoch in run.epochs(1):
    for x in data:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        if run.steps_done == 60 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not world.rank:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def env(tmp_path):
    return muster_env(tmp_path, TERM="xterm-256color", LANG="C.UTF-8", PYTHONUTF8="1")


def script(folder, text):
    """Write a script; return its path."""
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


@pytest.fixture
def run_id(tmp_path, env):
    path = script(tmp_path, SCRIPT)
    words = ("run", "--detach", "--nodes", "2", "--nproc-per-node", "1", path)
    run_id = run_muster(*words, env=env).stdout.strip()
    yield run_id
    run_muster("cancel", "--now", run_id, env=env)


def top(*words, env, **size):
    return TerminalOf([*MUSTER, "top", *words], env, **size)


@pytest.mark.short
def test_a_live_run_on_a_terminal_of_80_columns(run_id, env, tmp_path):
    with top(env=env) as screen:
        screen.wait_for("RUN", "running", "train.py", limit_s=60)
        screen.press("\r")
        screen.wait_for("attempt 1", "SIGKILL in rank 0 on n1", "slowest", limit_s=60)
        screen.wait_for("slowest     rank 1 on n2", "in data")
        text = screen.wait_for("left", "of 25000", "steps/s", "loss", "saved       step")
        assert max(map(len, text.splitlines())) <= 80

        screen.press("f1\r")
        screen.wait_for("1 of 2 ranks: 1", ">    1  n2")
        screen.press("s")
        screen.wait_for("stacks of", "rank 1 stands here:")
        screen.press("q?")
        screen.wait_for("AGE", "since the library's last sign")
        screen.resize(100, 30)
        screen.press("qa")
        screen.wait_for("ended after", "SIGKILL in rank 0 on n1", without=["since the library's"])
        screen.press("j\r")
        screen.wait_for("log of rank 0 in attempt 0", "n p next rank")
        screen.press("qql")
        screen.wait_for("log of rank 1")
        screen.press("qcyy")
        screen.wait_for("cancelled", "attempt 1   ended", limit_s=60)
        screen.press("qq")
        assert screen.wait_for_end() == 0
        assert b"\x1b[?1049l" in screen.sent, "the terminal has its other screen again"
        assert screen.sent.rstrip().endswith(b"\x1b[?25h\x1b[?1049l"), "and its cursor"
    plain = run_muster("top", run_id, env=env)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "ended by" in plain.stdout
    assert "\x1b" not in plain.stdout


def test_without_colour_and_without_unicode_nothing_is_lost(run_id, env):
    bare = {**env, "NO_COLOR": "1", "TERM": "vt100", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    with top(run_id, env=bare, columns=80, rows=24) as screen:
        screen.wait_for("attempt 1", "slowest", "!    1  n2", limit_s=60)
        assert b"38;" not in screen.sent, "no colour"
        screen.press("q")
        assert screen.wait_for_end() == 0
    assert screen.sent.isascii()


def test_one_picture_for_programs(run_id, env):
    with top(run_id, env=env) as screen:  # it runs by then
        screen.wait_for("steps/s", limit_s=60)
    live = json.loads(run_muster("top", run_id, "--json", env=env).stdout)
    assert (live["run_id"], live["state"], live["sample"]["nodes"]) == (
        run_id,
        "running",
        ["n1", "n2"],
    )
    runs = json.loads(run_muster("top", "--json", env=env).stdout)
    assert [one["run_id"] for one in runs] == [run_id]


def test_records_that_no_version_wrote_are_shown_or_said(env, tmp_path):
    path = script(tmp_path, "print('well')\n")
    assert run_muster("run", path, env=env).returncode == 0
    runs = os.path.join(env["MUSTER_HOME"], "runs")
    (well,) = os.listdir(runs)
    for number, text in enumerate(ODD):
        odd = os.path.join(runs, f"20990101-000000-odd-{number:04}")
        shutil.copytree(os.path.join(runs, well), odd)
        for name in ("events.jsonl", "training.jsonl", "samples.jsonl"):
            with open(os.path.join(odd, name), "a") as file:
                file.write(text)
        with open(
            os.path.join(odd, "owner.json"), "w"
        ) as file:  # it goes on, by all that can be seen
            json.dump({"pid": 1, "host": "elsewhere", "boot_id": "other"}, file)
        os.remove(os.path.join(odd, "result.json"))
    listed = run_muster("top", env=env)
    assert (listed.returncode, listed.stderr) == (0, "")
    with top(env=env, columns=120, rows=len(ODD) + 10) as screen:
        screen.wait_for("odd-0000", f"odd-{len(ODD) - 1:04}", limit_s=60)
        for _ in range(4):  # those that took the whole list away
            screen.press("G\r")
            screen.wait_for("q back", limit_s=60)
            screen.press("q")
            screen.wait_for("q quit", limit_s=60)
        screen.press("q")
        assert screen.wait_for_end() == 0
    assert b"Traceback" not in screen.sent


@pytest.mark.parametrize("how", ["finished", "killed"])
def test_a_recorded_run_on_a_terminal(env, tmp_path, how):
    """The record alone is shown: of a run that ended well, and of one whose owner was killed."""
    path = script(tmp_path, "print('well')\n")
    assert run_muster("run", "--nproc-per-node", "2", path, env=env).returncode == 0
    runs = os.path.join(env["MUSTER_HOME"], "runs")
    (name,) = os.listdir(runs)
    if how == "killed":
        os.remove(os.path.join(runs, name, "result.json"))
        with open(os.path.join(runs, name, "events.jsonl")) as file:
            kept = [line for line in file if "run_ended" not in line]
        with open(os.path.join(runs, name, "events.jsonl"), "w") as file:
            file.writelines(kept)
    with top(name, env=env) as screen:
        if how == "finished":
            screen.wait_for("succeeded", "attempt 0", "ended after", "train.py", limit_s=60)
        else:
            screen.wait_for("lost", "ended by", "its owner process has ended", limit_s=60)
        screen.press("a\r")
        screen.wait_for("log of rank 0 in attempt 0", "well", limit_s=60)
        screen.press("qqc")
        screen.wait_for("the run has ended")
        screen.press("q")
        assert screen.wait_for_end() == 0


def test_a_signal_gives_the_terminal_back(env, tmp_path):
    with top(env=env) as screen:
        screen.wait_for("no runs yet")
        os.kill(screen.pid, 15)
        assert screen.wait_for_end() == 143
        assert screen.sent.rstrip().endswith(b"\x1b[?25h\x1b[?1049l")


def test_a_run_that_nobody_knows_is_an_error(env):
    done = run_muster("top", "nothing", env=env)
    assert done.returncode != 0
    assert done.stderr.startswith("error: there is no run `nothing`")


def test_the_status_stands_below_the_output_of_a_run_and_goes_with_it(tmp_path, env):
    path = script(tmp_path, SCRIPT)
    words = ("run", "--progress", "full", "--nodes", "2", "--nproc-per-node", "1", path)
    with TerminalOf([*MUSTER, *words], env) as screen:
        text = screen.wait_for("ranks on 2 nodes", " left | loss", "slowest rank 1", limit_s=90)
        below = text.rstrip().splitlines()[-2:]
        assert below[0].startswith("train-")
        assert "running" in below[0]
        assert below[1].startswith("2 ranks on 2 nodes")
        assert not any("]  step" in line for line in text.splitlines())  # one clock is enough
        screen.press("\x03")
        screen.wait_for("cancelled after", without=["ranks on 2 nodes"], limit_s=60)
        assert screen.wait_for_end() == 130


def test_no_status_where_it_is_off(tmp_path, env):
    text = "import time\nfor n in range(14):\n    time.sleep(0.6)\nprint('done')\n"
    words = ("run", "--progress", "off", script(tmp_path, text))
    with TerminalOf([*MUSTER, *words], env) as screen:
        assert screen.wait_for_end(limit_s=60) == 0
    assert b"\x1b7" not in screen.sent
    assert b"running" not in screen.sent


def test_status_is_watched_until_the_end_of_a_run(run_id, env):
    with TerminalOf([*MUSTER, "status", "--watch", run_id], env) as screen:
        screen.wait_for("state    running", limit_s=60)
        run_muster("cancel", run_id, env=env)
        screen.wait_for("state    cancelled", limit_s=60)
        assert screen.wait_for_end() == 0
