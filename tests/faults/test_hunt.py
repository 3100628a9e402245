"""What a hunt for bugs found: each test failed before its mend."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit.command import MUSTER, muster_env, ran
from kit.waiting import wait_until
from torchmuster.core import proc

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")

WAITING = (
    "import os, signal, sys, time\n"
    "folder = sys.argv[1]\n"
    "signal.signal(signal.SIGINT, lambda *_: open(f'{folder}/caught', 'w').close())\n"
    "open(f'{folder}/ready', 'w').close()\n"
    "while not os.path.exists(f'{folder}/stop'):\n"
    "    time.sleep(0.01)\n"
)

# As loop.py, without torch: rank 0 dies by the word `kill`; with the word `leave` rank 1 leaves
# with code 75 and rank 0, once that is over, fails as a collective does.
LIGHT = (
    "import os, signal, sys, time\n"
    "folder, rank = sys.argv[1], os.environ['RANK']\n"
    "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
    "def exists(name):\n"
    "    return os.path.exists(f'{folder}/{name}')\n"
    "with open(f'{folder}/tmp-{attempt}-{rank}', 'w') as up:\n"
    "    up.write(f'{os.getpid()} {time.monotonic()} 2')\n"
    "os.rename(f'{folder}/tmp-{attempt}-{rank}', f'{folder}/up-{attempt}-{rank}')\n"
    "while not exists('stop'):\n"
    "    time.sleep(0.01)\n"
    "    if attempt == '0' and exists('do-0') and rank == '0':\n"
    "        os.kill(os.getpid(), signal.SIGKILL)\n"
    "    if attempt == '0' and exists('do-1') and rank == '1':\n"
    "        sys.exit(75)\n"
    "    if attempt == '0' and exists('gone') and rank == '0':\n"
    "        raise RuntimeError('Connection closed by peer [127.0.0.1]:1')\n"
)


@pytest.fixture
def light(job):
    """Return a started job of two nodes whose workers need no torch."""
    run = job("--nodes", "2", "--nproc-per-node", "1", "--start", "fresh")
    return run.write(LIGHT).start()


def muster(tmp_path, *words, **more):
    return ran([*MUSTER, *words], limit_s=60, env=muster_env(tmp_path / "home"), **more)


def test_what_the_shell_left_to_us_is_not_killed(tmp_path):
    script = tmp_path / "hello.py"
    script.write_text("print('hello')\n")
    log = tmp_path / "tee.log"
    line = f"exec {sys.executable} -m torchmuster run --start fresh {script} > >(tee {log}) 2>&1"
    env = muster_env(tmp_path / "home")
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    wait_until(lambda: "succeeded" in log.read_text(), "the last line in the log")
    assert "hello" in log.read_text()


def _is_agent(pid):
    """Say whether a child of a client is its agent: it asks git about the code, too."""
    try:
        return b"\0agent\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_client_that_missed_the_end_does_not_run_the_job_again(job):
    text = "import sys\nopen(sys.argv[1] + '/runs', 'a').write('once ')\n"
    run = job("--start", "fresh").write(text).start()
    client = run.process.pid
    wait_until(lambda: any(map(_is_agent, proc.children_of(client))), "the agent")
    os.kill(client, signal.SIGSTOP)
    wait_until(lambda: (run.home / "runs").is_dir() and run.events("run_ended"), "the end")

    def lives(pid):
        return _is_agent(pid) and proc.is_running(pid)

    wait_until(lambda: not any(map(lives, proc.children_of(client))), "the agent's end")
    os.kill(client, signal.SIGCONT)
    assert run.wait() == 0
    assert (run.folder / "runs").read_text() == "once "


def test_echoes_of_a_preemption_spend_no_restart(light):
    light.wait_up(0, 2)
    light.order(1, "leave")
    light.wait_event("worker_ended")
    (light.folder / "gone").touch()
    light.wait_up(1, 2)
    assert light.finish() == 0
    assert light.result()["restarts_spent"] == 0


def agent_at(run, place, other_than=None):
    """Return the process of the agent at a place."""
    for pid in proc.children_of(run.process.pid):
        try:
            is_there = f"--place={place}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:  # it has ended since the list was made
            continue
        if is_there and pid != other_than:
            return pid
    return None


def test_an_agent_that_dies_before_it_has_called_is_replaced(light):
    second = wait_until(lambda: agent_at(light, 1), "the second agent")
    os.kill(second, signal.SIGKILL)
    light.wait_up(0, 2, 20)
    assert light.finish() == 0


@pytest.mark.parametrize("moment", ["nothing has followed", "it is started again", "it is back"])
def test_a_run_goes_on_whenever_its_head_falls_behind_another_node(job, moment):
    run = job("--nodes", "3", "--nproc-per-node", "1", "--start", "fresh")
    run.write(LIGHT).start().wait_up(0, 3)
    lost = run.agent_pid("n2")
    os.kill(lost, signal.SIGKILL)
    if moment == "it is started again":
        wait_until(lambda: agent_at(run, 1, other_than=lost), "the replacement's process")
    elif moment == "it is back":
        wait_until(lambda: run.agent_pid("n2") != lost, "the replacement at the head")
    os.kill(run.agent_pid("n1"), signal.SIGKILL)

    def is_up_again():
        assert run.process.poll() is None, run.stderr
        number = run.events("attempt_started")[-1]["attempt"]
        return number and len(run.up(number)) == 3

    wait_until(is_up_again, "the next attempt")
    assert run.finish() == 0


def test_a_spawner_that_stands_still_does_not_hold_the_next_attempt(light):
    light.wait_up(0, 2)
    os.kill(light.spawner_pid("n2"), signal.SIGSTOP)
    light.order(0, "kill")
    light.wait_up(1, 2)
    assert light.finish() == 0


def test_a_head_that_cannot_start_workers_ends_with_its_own_code(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken')\n")
    (tmp_path / "train.py").touch()
    done = muster(tmp_path, "torchrun", "--standalone", str(tmp_path / "train.py"))
    assert done.returncode == 1, done.stderr
    assert "the head of this run has ended" not in done.stderr


def test_input_from_a_file_or_a_pipe_reaches_its_rank_whole(tmp_path):
    script = tmp_path / "count.py"
    script.write_text("import sys\nprint(len(sys.stdin.buffer.read()))\n")
    data = os.urandom(300_000)
    (tmp_path / "data").write_bytes(data)
    words = [*MUSTER, "run", "--start", "fresh", "--stdin", "0"]
    run = {"env": muster_env(tmp_path / "home"), "capture_output": True, "timeout": 60}
    assert subprocess.run([*words, str(script)], input=data, **run).stdout == b"300000\n"
    with open(tmp_path / "data", "rb") as file:
        assert subprocess.run([*words, str(script)], stdin=file, **run).stdout == b"300000\n"


def test_a_detached_run_has_a_living_owner_from_the_first_moment(tmp_path):
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    done = muster(
        tmp_path, "run", "--detach", "--run-id", "away", "--start", "fresh",
        str(script), str(tmp_path),
    )  # fmt: skip
    owner = json.loads((tmp_path / "home" / "runs" / "away" / "owner.json").read_text())
    assert done.returncode == 0
    assert proc.is_running(owner["pid"])
    (tmp_path / "stop").touch()
    assert muster(tmp_path, "wait", "away").returncode == 0


def test_a_child_that_floods_its_dead_parents_output_does_not_hold_the_end(tmp_path):
    script = tmp_path / "flood.py"
    script.write_text("import subprocess\nsubprocess.Popen(['yes'])\nsubprocess.Popen(['yes'])\n")
    done = muster(tmp_path, "run", "--tee", "none", "--start", "fresh", str(script))
    assert done.returncode == 0, done.stderr


def test_a_spawner_killed_while_it_imports_is_replaced(job):
    run = job("--nodes", "2", "--nproc-per-node", "1").start()
    run.wait_event("agent_joined", 2)
    os.kill(run.spawner_pid("n2"), signal.SIGKILL)
    run.wait_up(0, 2, 30)
    assert run.finish() == 0
