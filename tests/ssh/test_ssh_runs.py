"""Runs on real hosts: an sshd each, that see neither each other's files nor the client's."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time

import pytest

from kit.waiting import wait_until
from ssh.hosts import processes_with

TRAIN = """\
import os, sys, torch, torch.distributed as dist
import torchmuster
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank = os.environ["RANK"]
print("sum", int(total.item()), "in", os.getcwd(), "from", torchmuster.__file__)
with open(f"out {rank}.txt", "w") as file:
    file.write(rank)
"""
# The first attempt waits for its end; later ones leave at once.
WAIT = """\
import os, signal
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "rank", os.environ["RANK"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.pause()
"""
QUICK = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"


def script(hosts, text):
    (hosts.code / "my train.py").write_text(text)
    return "my train.py"


def only_run(home):
    (path,) = (home / "runs").iterdir()
    return path


def started(run, workers):
    """Return a condition: so many ranks of attempt 0 have printed, as the client's record says."""

    def look():
        logs = list((run / "logs" / "main" / "train" / "attempt-0").glob("rank-*.log"))
        return len([log for log in logs if log.stat().st_size]) == workers

    return look


@contextlib.contextmanager
def waiting(hosts, *words, workers=2):
    """Give the client of a run whose workers wait; it is killed afterwards."""
    process = hosts.start(*words, script(hosts, WAIT))
    try:
        wait_until((hosts.home / "runs").exists, what="a run directory")
        wait_until(started(only_run(hosts.home), workers), "the first attempt", 60)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=180)


def events_of(run, name):
    """Return the events of a name in the client's record."""
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def test_hosts_that_share_nothing_train_together(hosts):
    """Code, torchmuster and secret travel there; logs, record and outputs come back."""
    homes = [hosts.add("a", blind=True, rc="echo noise of a shell\n"), hosts.add("b")]
    words = ("--hosts", "a:2,b", "--tee", "all")
    out, err = hosts.must(*words, script(hosts, TRAIN))
    assert out.count("sum 3 in") == 3
    assert f"{homes[0]}/.cache/torchmuster/" in out
    assert "no shared file system: copied" in err
    assert "to 2 hosts" in err
    run = only_run(hosts.home)
    assert {path.name for path in run.glob("output/a/*")} == {"out 0.txt", "out 1.txt"}
    assert (run / "output" / "b" / "out 2.txt").read_text() == "2"
    logs = run / "logs" / "main" / "train" / "attempt-0"
    assert all("sum 3" in (logs / f"rank-{rank}.log").read_text() for rank in range(3))
    assert json.loads((run / "result.json").read_text())["state"] == "succeeded"
    assert not list(hosts.folder.glob("host-*/home/.muster/runs/*/secret"))
    assert not processes_with(str(hosts.folder / "host-a" / "home"))


def test_shared_folders_are_used_as_they_are(hosts):
    homes = hosts.add_all("a", "b", shares=True)
    _, err = hosts.must("--on", "ssh", "--hosts", "a,b", script(hosts, TRAIN))
    assert "copied" not in err
    assert not any((home / ".muster").exists() for home in homes)
    assert (hosts.code / "out 1.txt").exists()


def test_an_agent_that_is_killed_leaves_no_folder_on_its_host(hosts):
    home = hosts.add("a", shares=True, rc='export TMPDIR="$HOME/tmp"\n')
    temporary = home / "tmp"
    temporary.mkdir()
    words = ("--on", "ssh", "--hosts", "a", "--max-restarts", "0", "--run-id", "r")
    with hosts.start(*words, script(hosts, WAIT)) as process:
        run = hosts.home / "runs" / "r"
        wait_until(started(run, 1), "the worker")
        left = list(temporary.glob("muster-*"))
        os.kill(events_of(run, "agent_joined")[0]["pid"], signal.SIGKILL)
        _, err = process.communicate(timeout=180)

    assert "the head's agent ended (SIGKILL)" in err
    assert left
    assert not list(temporary.glob("muster-*"))


def test_a_restart_is_on_the_hosts_again(hosts):
    hosts.add_all("a", "b", shares=True)
    words = ("--on", "ssh", "--hosts", "a,b", "--run-id", "r")
    _, err = hosts.must(*words, script(hosts, TRAIN))
    _, err = hosts.must("r", command="restart")
    assert " on a, b; logs in" in err


def test_all_bad_hosts_are_named_in_the_time_that_one_takes(hosts):
    silent = [f"silent{number}" for number in range(8)]
    hosts.add("good", blind=True)
    hosts.add("locked", knows_us=False)
    hosts.add("stranger", known=False)
    hosts.add("stuck", rc="exec cat > /dev/null\n")  # a shell that never gets to its command
    hosts.add_closed("closed")
    with contextlib.ExitStack() as listening:
        for name in silent:
            listening.enter_context(hosts.add_silent(name))
        begun = time.monotonic()
        names = ",".join(["good,locked,stranger,closed,stuck", *silent])
        code, _, err = hosts.run("--hosts", names, script(hosts, QUICK), limit_s=150)
        elapsed_s = time.monotonic() - begun
    assert code == 5, err
    assert elapsed_s < 60  # each that does not answer has ten; one after the other they take 90
    assert "12 hosts can't be used" in err
    assert "locked: " in err
    assert "Permission denied" in err
    assert "ssh-copy-id locked" in err
    assert "Host key verification failed" in err
    assert "`ssh stranger` once" in err
    assert "Connection refused" in err
    assert all(f"{name}: " in err for name in silent)
    assert "stuck: no answer for 10 s" in err
    wait_until(lambda: not processes_with(str(hosts.folder / "host-good" / "home")))


def test_missing_host_of_a_range_is_a_warning(hosts):
    hosts.add("a")
    hosts.add_closed("gone")
    words = ("--hosts", "gone,a", "--nodes", "1:2", "--last-call", "0.1")
    out, err = hosts.must(*words, script(hosts, QUICK))
    assert "gone: " in err
    assert "the run begins without it" in err
    assert "rank 0 of 1" in out


def test_spare_host_stands_in_for_one_that_does_not_answer(hosts):
    hosts.add_closed("gone")
    hosts.add("spare")
    out, err = hosts.must("--hosts", "gone,spare", "--nodes", "1", script(hosts, QUICK))
    assert "gone: " in err
    assert "spare hosts replace them: spare" in err
    assert "rank 0 of 1" in out


def test_killed_client_leaves_nothing_on_hosts(hosts):
    left = _start_waiting(hosts, lambda process: process.kill())
    wait_until(lambda: not left(), "the end of agents and remote ends, and of the secrets", 30)


@pytest.mark.slow
@pytest.mark.lab
def test_client_that_says_nothing_for_twenty_seconds_leaves_nothing_on_hosts(hosts):
    left = _start_waiting(hosts, lambda process: process.send_signal(signal.SIGSTOP))
    wait_until(lambda: not left(), "the end of agents and remote ends, and of the secrets", 35)


def _start_waiting(hosts, end):
    """Start a run that waits, end its client, and return what is left of it on the hosts."""
    hosts.add_all("a", "b", blind=True)

    def left():
        found = [processes_with(f"{hosts.folder}/host-{name}/home") for name in "ab"]
        return [*found[0], *found[1], *hosts.folder.glob("host-*/home/.muster/runs/*/secret")]

    with waiting(hosts, "--hosts", "a,b") as process:
        assert len(left()) >= 6  # an agent, a remote end and a secret on each
        end(process)
        if process.poll() is None:
            wait_until(lambda: not left(), "the end on the hosts")
    return left


def run_and_cut(hosts, lost, text, *words, is_ready):
    """Run a script, cut a host for good once `is_ready(run directory)`, and return the exit code, stdout and stderr."""
    process = hosts.start(*words, script(hosts, text))
    try:
        wait_until((hosts.home / "runs").exists, what="a run directory")
        run = only_run(hosts.home)
        wait_until(lambda: is_ready(run), "the first attempt", 60)
        hosts.cut(lost, for_good=True)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def train_and_lose(hosts, lost, *more):
    """Train on two hosts of three and cut one of the two for good; return what the client said."""
    hosts.add_all("a", "b", "spare")
    words = ("--hosts", "a,b,spare", "--nodes", "2", *more, "--tee", "all")
    code, out, err = run_and_cut(hosts, lost, WAIT, *words, is_ready=lambda run: started(run, 2)())
    assert code == 0, err
    return out, err


@pytest.mark.lab
def test_spare_host_takes_the_place_of_one_that_is_lost(hosts):
    out, err = train_and_lose(hosts, "b")
    assert "the spare host spare takes place 1" in err
    assert "attempt 1 rank 1" in out


@pytest.mark.lab
def test_a_spare_host_that_has_joined_takes_the_place_of_one_that_is_lost(hosts):
    out, err = train_and_lose(hosts, "b", "--spares", "1")
    assert "the spare spare takes the place of b" in err
    assert "attempt 1 rank 1" in out


@pytest.mark.parametrize(
    ("cut", "rank", "words"),
    [
        pytest.param("a", 0, "another one takes its place with attempt 1", id="the head"),
        pytest.param("b", 1, "the connection to b", id="another host"),
    ],
)
def test_a_host_whose_connection_is_cut_comes_again(hosts, cut, rank, words):
    hosts.add_all("a", "b")
    with waiting(hosts, "--hosts", "a,b", "--tee", "all") as process:
        hosts.cut(cut)
        out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert words in err
    assert f"attempt 1 rank {rank}" in out
    begun = [event["attempt"] for event in events_of(only_run(hosts.home), "attempt_started")]
    assert begun == [0, 1]  # the record goes on where it was


def test_stop_reaches_the_workers_and_leaves_nothing(hosts):
    hosts.add("a", blind=True)
    with waiting(hosts, "--hosts", "a", workers=1) as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert not processes_with(f"{hosts.folder}/host-a/home")


@pytest.mark.short
def test_dry_run_prints_the_commands_and_calls_nobody(hosts):
    hosts.add_closed("a")
    out, _ = hosts.must("--hosts", "a,me@b:2", "--dry-run", script(hosts, QUICK))
    lines = [line for line in out.splitlines() if line.startswith("$ ")]
    assert [" -l me b " in line for line in lines] == [False, True]
    assert all("BatchMode=yes" in line and "exec /bin/sh -c" in line for line in lines)
    assert "my code" in out
    assert not (hosts.home / "runs").exists()


def test_detach_is_refused_with_a_way_out(hosts):
    code, _, err = hosts.run("--hosts", "a", "--detach", script(hosts, QUICK))
    assert code == 2
    assert "tmux new" in err
    assert os.listdir(hosts.client) == ["my code"]


def test_master_of_a_persistent_connection_lives_on(hosts):
    """The user's ControlMaster is used, and what it leaves behind is not ours to end."""
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        hosts.more = f" ControlMaster auto\n ControlPath {folder}/%C\n ControlPersist 60\n"
        hosts.add("a")
        ssh = hosts.environment()["MUSTER_SSH"].split()
        try:
            for _ in range(2):
                hosts.must("--hosts", "a", script(hosts, QUICK))
                check = subprocess.run([*ssh, "-O", "check", "a"], capture_output=True, timeout=20)
                assert b"Master running" in check.stderr
        finally:
            subprocess.run([*ssh, "-O", "exit", "a"], capture_output=True, timeout=20)


@pytest.mark.lab
def test_spare_host_takes_the_place_of_a_head_that_is_lost(hosts):
    out, err = train_and_lose(hosts, "a")
    assert "the spare host spare takes place 0; snapshots that only a has are not there" in err
    assert "attempt 1 rank 0" in out
    begun = [event["attempt"] for event in events_of(only_run(hosts.home), "attempt_started")]
    assert begun == [0, 1]  # the new head's record stands behind that of the lost one


@pytest.mark.lab
def test_head_goes_to_the_host_of_another_node_where_the_world_may_shrink(hosts):
    hosts.add_all("a", "b")
    words = ("--hosts", "a,b", "--nodes", "1:2", "--tee", "all")
    code, out, err = run_and_cut(hosts, "a", WAIT, *words, is_ready=lambda run: started(run, 2)())
    assert code == 0, err
    assert "the host b takes place 0; snapshots that only a has are not there" in err
    assert "attempt 1 rank 0" in out


def test_head_that_can_not_be_reached_again_ends_the_run_with_a_result(hosts):
    hosts.add("a")
    words = ("--hosts", "a")
    code, _, err = run_and_cut(hosts, "a", WAIT, *words, is_ready=lambda run: started(run, 1)())
    assert code == 5, err
    result = json.loads((only_run(hosts.home) / "result.json").read_text())
    assert result["state"] == "failed"
    assert "1 host can't be used: a" in result["report"]["error"]
    assert "Connection refused" in " ".join(result["report"]["because"])
    assert result["report"]["error"] in err


def test_stop_while_the_head_is_called_again_is_taken_at_once(hosts):
    hosts.add("a")
    # From the moment it is silent, it takes calls and says nothing.
    with waiting(hosts, "--hosts", "a", workers=1) as process, hosts.silence("a"):
        hosts.cut("a")
        said = _read_until(process, "another one takes its place")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=180)
        assert "can't be used" not in err  # as after the 10 s that a host has for its answer
    assert process.returncode == 128 + signal.SIGINT, said + err
    assert json.loads((only_run(hosts.home) / "result.json").read_text())["state"] == "cancelled"


def _read_until(process, text):
    said = ""
    while text not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


def test_report_names_files_of_the_client_where_hosts_share_nothing(hosts):
    hosts.add("a")
    code, _, err = hosts.run("--hosts", "a", script(hosts, "raise ValueError('no')\n"))
    assert code == 1, err
    run = only_run(hosts.home)
    text = (run / "result.json").read_text()
    assert f"{hosts.folder}/host-a" not in text
    assert str(hosts.code / "my train.py") in text
    assert f"at: {hosts.code}/my train.py:1" in err


@pytest.mark.lab
def test_muster_home_in_the_code_folder_stays_here(hosts):
    hosts.home = hosts.code / "own home"
    home = hosts.add("a")
    for _ in range(2):
        _, err = hosts.must("--hosts", "a", script(hosts, QUICK))
    assert "(1 files," in err
    assert not list(home.glob(".muster/runs/*/code/own home"))


def test_nodes_of_the_site_are_used_and_only_hosts_that_are_used_are_named(hosts):
    hosts.add("a")
    hosts.add_closed("gone")
    text = "[engines.lab]\nkind = 'ssh'\nhosts = ['a', 'gone']\nnodes = '1:2'\n"
    (hosts.code / "muster.toml").write_text(text)
    out, err = hosts.must("--on", "lab", "--last-call", "0.1", script(hosts, QUICK))
    assert "rank 0 of 1" in out
    assert " on a; logs in" in err


# Kills its agent once, at step 5 of rank 0's node: with it goes the head, and all that this host's memory holds.
REMEMBERS = """\
import os, signal, sys, torch
from pathlib import Path
import torchmuster.train as tm
world = tm.init(seed=1)
model = world.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
data = world.loader(torch.utils.data.TensorDataset(torch.arange(160.).view(40, 4)), global_batch_size=4)
run = world.resume(model=model, optimizer=optimizer, data=data, every_epoch=False, memory_every_steps=1)
for _ in run.epochs(1):
    for (x,) in data:
        if run.steps_done == 5 and world.rank == 0 and not os.path.exists(sys.argv[1]):
            Path(sys.argv[1]).touch()
            parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(parent), signal.SIGKILL)
            signal.pause()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
"""


def resumes_from_memory(said):
    """Fail unless the run has gone on once, where it was killed."""
    resumed = [line for line in said.splitlines() if "from the memory of the nodes" in line]
    assert len(resumed) == 1, said
    assert int(resumed[0].split("after step ")[1].split()[0]) in (4, 5)


def test_memory_of_the_other_host_outlives_the_head(hosts, tmp_path):
    hosts.add_all("a", "b")
    words = ("--hosts", "a,b", script(hosts, REMEMBERS), tmp_path / "killed")
    _, err = hosts.must(*words)
    assert "another one takes its place with attempt 1" in err
    resumes_from_memory(err)
    joined = events_of(only_run(hosts.home), "agent_joined")
    assert len({event["pid"] for event in joined}) == 3, "the agent of b has stayed"


# Waits at step 5 of its first attempt until a host is lost.
HOLDS = REMEMBERS.replace("signal.SIGKILL", "0").replace(
    "signal.pause", "print('held', flush=True), signal.pause"
)
HOLDS = HOLDS.replace(
    "not os.path.exists(sys.argv[1])", "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
)
HOLDS = HOLDS.replace("            Path(sys.argv[1]).touch()\n", "")


@pytest.mark.lab
@pytest.mark.parametrize("lost", ["a", "b"])
def test_memory_of_the_other_host_outlives_a_host(hosts, lost):
    hosts.add_all("a", "b", "spare")
    words = ("--hosts", "a,b,spare", "--nodes", "2", "--spares", "1", "--tee", "all")

    def is_held(run):
        log = run / "logs/main/train/attempt-0/rank-0.log"
        return log.exists() and "held" in log.read_text()

    code, _, err = run_and_cut(hosts, lost, HOLDS, *words, is_ready=is_held)
    assert code == 0, err
    resumes_from_memory(err)
