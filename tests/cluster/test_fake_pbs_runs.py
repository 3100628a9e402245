"""`muster run --on pbs` against pretended commands that answer as a real server did."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from cluster.pbs import NOTES
from cluster.slurm import SCRIPT
from kit.command import SOURCE
from kit.ports import reserve_port
from kit.waiting import wait_until


@pytest.fixture
def muster(pbs):
    """Return a function that runs `muster` on the login node of the pretended PBS."""
    pbs.muster.script(SCRIPT)
    return pbs.muster


ON = ("run", "--on", "pbs", "--nodes", "2", "--nproc-per-node", "1", "--run-id", "r")


def site(folder, *lines, more=""):
    """Let `olivia` be a PBS with these setup lines."""
    text = f'[engines.olivia]\nkind = "pbs"\nsetup = {json.dumps(lines)}\n{more}'
    (folder / "muster.toml").write_text(text)


@pytest.mark.short
def test_a_run_trains_on_two_hosts(muster):
    done = muster(*ON, "--tee", "all", "train.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2") == 2
    assert "is job" in done.stderr
    assert "succeeded after" in done.stderr


def test_lines_of_the_site_reach_the_workers_of_every_host(muster, tmp_path):
    site(tmp_path, "export MODULE=loaded")
    (tmp_path / "show.py").write_text(
        "import os; print('module', os.environ['MODULE'], flush=True)"
    )
    done = muster(*ON[:1], "--on", "olivia", *ON[3:], "--tee", "all", "show.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("module loaded") == 2
    path = tmp_path / "home" / "runs" / "r" / "environment.json"
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_job_is_cancelled_by_the_runs_name(muster, tmp_path):
    assert muster(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    muster.wait_for("sum 2")

    assert muster.state() == "running"
    assert muster("cancel", "r").returncode == 0
    assert muster.state() == "cancelled"


def test_an_unknown_queue_is_explained(muster):
    done = muster(*ON, "--queue", "nope", "train.py")

    assert done.returncode == 14
    assert "Unknown queue" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_first_settings_take_the_server_s_default_queue(pbs, muster):
    pbs.settings(queues=["workq", "short"])
    said = muster("init").stdout

    assert '[engines.pbs]\nkind = "pbs"\nqueue = "workq"\n' in said
    assert "#   short: " in said


def test_groups_of_a_workflow_are_jobs_that_wait_for_each_other(muster, tmp_path):
    site(tmp_path, "export MODULE=loaded", f"echo ran >> {tmp_path}/lines")
    (tmp_path / "w.yaml").write_text(
        f"""
workflow:
  name: two
  groups:
  - name: make
    tasks:
    - name: first
      lead: true
      command: [bash, -c, "echo $MODULE > {{{{output}}}}/a"]
    - name: second
      command: [bash, -c, "echo $MODULE > {{{{output}}}}/b"]
    ignoreNonleadStatus: false
  - name: read
    tasks:
    - name: reader
      command: [bash, -c, "cat {{{{input:0}}}}/a {{{{input:1}}}}/b > {tmp_path}/end"]
      inputs: [{{task: first}}, {{task: second}}]
"""
    )
    done = muster("submit", "w.yaml", "--on", "olivia", "--run-id", "w")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "end").read_text() == "loaded\nloaded\n"
    assert (tmp_path / "lines").read_text() == "ran\n" * 3, "once on each of three nodes"


def test_a_setup_line_that_fails_on_a_task_s_node_is_named(muster, tmp_path):
    site(tmp_path, "export MODULE=loaded", "echo no such module >&2; false")
    (tmp_path / "w.yaml").write_text(
        f"workflow: {{name: one, tasks: [{{name: t, command: [touch, {tmp_path}/began]}}]}}\n"
    )
    done = muster("submit", "w.yaml", "--on", "olivia", "--run-id", "w")

    assert done.returncode != 0
    assert "a setup line failed on" in done.stderr
    assert "setup, line 2: echo no such module >&2; false" in done.stderr
    assert "no such module\n" in done.stderr
    assert not (tmp_path / "began").exists()


def test_setup_lines_run_on_every_node_of_a_training_task(muster, tmp_path):
    site(tmp_path, "export MODULE=loaded", f"echo ran >> {tmp_path}/lines")
    (tmp_path / "show.py").write_text(
        "import os; open(f'{os.environ[\"RANK\"]}.txt', 'w').write(os.environ['MODULE'])"
    )
    (tmp_path / "w.yaml").write_text(
        "workflow: {name: one, tasks: [{name: t, script: show.py, nodes: 2, nproc_per_node: 1}]}\n"
    )
    done = muster("submit", "w.yaml", "--on", "olivia", "--run-id", "w")

    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["loaded"] * 2
    assert (tmp_path / "lines").read_text() == "ran\n" * 2, "once on each of two nodes"


CATCHES = """
import os, signal, sys, torch.distributed as dist
caught = lambda number, frame: (os.write(1, b"caught SIGTERM\\n"), os._exit(0))
signal.signal(signal.SIGTERM, caught)
dist.init_process_group("gloo")
os.write(1, b"sum 2\\n")
while True:
    signal.pause()
"""


@pytest.mark.parametrize("json_is_known", [True, False])
def test_a_cancelled_job_gives_every_worker_sigterm_first(pbs, muster, tmp_path, json_is_known):
    pbs.settings(json=json_is_known, kill_delay_s=10.0)
    (tmp_path / "train.py").write_text(CATCHES)
    assert muster(*ON, "--detach", "train.py").stdout == "r\n"
    for rank in (0, 1):
        muster.wait_for("sum 2", rank)

    assert muster("cancel", "r").returncode == 0
    wait_until(muster.path("result.json").exists, "the result", 40.0)
    assert muster.read("result.json")["state"] == "cancelled"
    for rank in (0, 1):  # its agent writes it behind the loop, the head the result
        muster.wait_for("caught SIGTERM", rank)
    assert muster.state() == "cancelled"


def test_a_rerun_job_goes_on_counting_its_attempts(pbs, muster, tmp_path):
    assert muster(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    muster.wait_for("sum 2")
    assert pbs.call("qrerun", "0.ctl").returncode == 0

    muster.wait_for("attempt 1", attempt=1)
    assert pbs.view("0.ctl")["run_count"] == 2
    assert muster.state() == "running"
    assert muster("cancel", "r").returncode == 0


def test_a_server_without_json_is_understood(pbs, muster):
    pbs.settings(json=False)
    done = muster(*ON, "--tee", "all", "train.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2") == 2


def test_another_way_to_the_hosts_is_taken_where_the_site_says_so(pbs, muster, tmp_path):
    site(tmp_path, more='start_with = ["mpiexec", "pbs_tmrsh"]\n')
    done = muster(*ON[:1], "--on", "olivia", *ON[3:], "--tee", "all", "train.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2") == 2
    pbs.wait("0.ctl", "F", 60.0)
    said = muster.said()
    assert "started by pbs_tmrsh: there is no mpiexec here that works" in said


def test_inside_a_script_each_host_gets_one_agent_whatever_mpiprocs_is(pbs, muster, tmp_path):
    job = pbs.submit(
        f"export PYTHONPATH={SOURCE} MUSTER_HOME={tmp_path}/home; cd {tmp_path}\n"
        f"{sys.executable} -m torchmuster run --nproc-per-node 2 --tee all train.py",
        "-l",
        "select=2:ncpus=4:mpiprocs=4",
        "-l",
        "place=scatter",
    )
    view = pbs.wait(job, "F", 90.0)
    text = pbs.output(job)

    assert view["Exit_status"] == 0, text
    assert text.count("sum 4") == 4, text
    assert "inside job 0.ctl of pbs, on n1, n2" in text


SAYS_ITS_JOB = """
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "in", os.environ["PBS_JOBID"], flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


def test_two_jobs_of_an_array_at_one_address_never_train_together(pbs, tmp_path):
    (tmp_path / "train.py").write_text(SAYS_ITS_JOB)
    job = pbs.submit(
        f"export PYTHONPATH={SOURCE} MUSTER_HOME={tmp_path}/home; cd {tmp_path}\n"
        f"{sys.executable} -m torchmuster torchrun --nnodes 2 --nproc-per-node 1"
        f" --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{reserve_port()} train.py {tmp_path}/end\n"
        f"code=$?; [ $code = 0 ] || touch {tmp_path}/end; exit $code",
        *("-J", "1-2", "-N", "arr", "-l", "select=2:ncpus=2", "-l", "place=scatter"),
    )
    pbs.wait(job, "F", 90.0)

    said = {index: (tmp_path / f"arr.o0.{index}").read_text() for index in (1, 2)}
    codes = {index: pbs.view(f"0[{index}].ctl")["Exit_status"] for index in (1, 2)}
    (ran,) = (index for index in (1, 2) if codes[index] == 0)
    assert said[ran].count(f" of 2 in 0[{ran}].ctl") == 2, said
    assert "give each job a port of its own" in said[3 - ran], said


# Needs no torch: quick to start. Attempt 0 stands still, the next ones end well.
STAYS = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"caught SIGTERM\\n"), os._exit(0)))
os.write(1, b"ready\\n")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while True:
        signal.pause()
"""


def _begin_to_stay(muster, *options):
    muster.script(STAYS)
    assert muster(*ON, *options, "--detach", "train.py").stdout == "r\n"
    for rank in (0, 1):
        muster.wait_for("ready", rank)


def test_the_end_of_the_walltime_is_a_time_limit_and_gives_every_worker_sigterm_first(
    pbs, muster, tmp_path
):
    pbs.settings(kill_delay_s=10.0, queue_walltime="00:00:15")
    _begin_to_stay(muster)

    assert muster("wait", "r").returncode == 143
    assert pbs.wait("0.ctl", "F")["Exit_status"] == -29
    for rank in (0, 1):  # its agent writes it behind the loop, the head the result
        muster.wait_for("caught SIGTERM", rank)
    assert muster.state() == "timed out"
    (found,) = json.loads(muster("explain", "r", "--json").stdout)["found"]
    assert (found["cause"], found["confidence"]) == ("time-limit", "high")
    said = muster.said()
    assert "the end of the job's time asked" in said, "whoever has heard of the signal first"


def test_a_job_that_pbs_ends_for_a_lost_host_goes_on_in_another(pbs, muster, tmp_path):
    pbs.settings(kill_delay_s=10.0)
    _begin_to_stay(muster, "--resubmit", "1")
    pbs.change(lost=["n2"])
    events = muster.path("events.jsonl")
    wait_until(lambda: '"node_lost"' in events.read_text(), "the loss")
    pbs.change(lost=[])

    assert muster("wait", "r").returncode == 0
    assert pbs.view("0.ctl")["Exit_status"] == 271, "PBS has ended it"
    assert pbs.wait("1.ctl", "F")["Exit_status"] == 0
    first = muster.read("result.json.1")
    assert (first["state"], first["exit_code"]) == ("preempted", 75)
    assert first["report"]["error"] == "n2 was lost, and the job was stopped with SIGTERM then"
    said = muster.said()
    assert "the run continues: link 2 of 2 is job 1.ctl" in said


@pytest.mark.parametrize(
    ("words", "state", "code"),
    [
        ("mem 799544kb exceeded limit 716800kb", "failed", 137),
        ("node 1 (n2) requested job die, code 15009", "preempted", 75),  # its mom was started again
    ],
)
def test_why_pbs_ended_a_job_is_told_by_its_own_line(pbs, muster, tmp_path, words, state, code):
    assert muster(*ON, "--detach", "train.py", "wait").stdout == "r\n"
    muster.wait_for("sum 2")
    pbs.end(muster.job(), words)
    waited = muster("wait", "r")
    assert waited.returncode == code, waited.stderr
    found = muster.read("result.json")
    assert found["state"] == state
    assert found["report"]["because"] == [f"=>> PBS: job killed: {words}"]
    assert f"=>> PBS: job killed: {words}" in muster("status", "r").stdout


def test_a_run_that_pbs_ends_for_a_restarted_mom_goes_on_in_another_job(pbs, muster, tmp_path):
    assert muster(*ON, "--detach", "--resubmit", "1", "train.py", "wait").stdout == "r\n"
    muster.wait_for("sum 2")
    pbs.end(muster.job(), "node 1 (n2) requested job die, code 15009")
    muster.wait_for("sum 2", attempt=1)
    assert muster("cancel", "r").returncode == 0


def test_cancel_tells_the_head_where_the_server_is_down(pbs, muster, tmp_path):
    _begin_to_stay(muster)
    pbs.change(is_down=True)
    done = muster("cancel", "r")
    wait_until(muster.path("result.json").exists, "the result")
    pbs.change(is_down=False)

    assert done.returncode == 0, done.stderr
    assert muster.read("result.json")["state"] == "cancelled"
    assert muster.read("result.json")["report"]["because"] == ["you cancelled it"]
    assert "terminated by" not in pbs.wait("0.ctl", "F")["comment"], "the server heard nothing"


STEPS = """
import os, pathlib, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
go_on = True
while go_on:
    dist.all_reduce(torch.ones(1))
    os.write(1, b"step\\n")
    end = torch.tensor([pathlib.Path(sys.argv[1]).exists() and dist.get_rank() == 0], dtype=torch.int)
    dist.broadcast(end, 0)
    go_on = not end.item()
    time.sleep(0.1)
"""
LONGER_THAN_A_LEASE_S = 17.0


def test_a_whole_job_is_suspended_beyond_its_leases_and_goes_on(pbs, muster, tmp_path):
    (tmp_path / "train.py").write_text(STEPS)
    assert muster(*ON, "--detach", "train.py", str(tmp_path / "end")).stdout == "r\n"
    muster.wait_for("step\nstep\n", 1)
    sessions = pbs.sessions("0.ctl")
    processes = [pid for pid in pbs.processes() if b"PBS_JOBID=0.ctl" in _environment_of(pid)]
    assert len(processes) >= 8, "script, head, two agents, two spawners, two workers"
    assert {os.getsid(pid) for pid in processes} <= sessions, "PBS knows them all"

    pbs.call("qsig", "-s", "suspend", "0.ctl")
    pbs.wait("0.ctl", "S")
    wait_until(lambda: all(_state_of(pid) == "T" for pid in processes), "all to stand still")
    before = time.monotonic()
    said = muster("stacks", "r")
    assert said.returncode != 0
    assert "job 0.ctl is suspended: no process of it answers" in said.stderr
    wait_until(
        lambda: time.monotonic() > before + LONGER_THAN_A_LEASE_S, "the leases to pass", 30.0
    )
    seen = len(muster.log(1).read_text().splitlines())
    pbs.call("qsig", "-s", "resume", "0.ctl")
    log = muster.log(1)
    wait_until(lambda: len(log.read_text().splitlines()) > seen + 50, "further steps", 60.0)
    (tmp_path / "end").touch()

    assert muster("wait", "r").returncode == 0
    result = muster.read("result.json")
    assert (result["attempts"], result["restarts_spent"]) == (1, 0)
    assert pbs.wait("0.ctl")["resources_used"]["cput"] > "00:00:00", "workers are accounted"


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_that_was_started_elsewhere_has_one_head_and_one_training(
    pbs, muster, tmp_path, nodes
):
    (tmp_path / "train.py").write_text(NOTES)
    steps = tmp_path / "steps"
    words = ("run", "--on", "pbs", "--nodes", str(nodes), "--nproc-per-node", "1")
    assert muster(*words, "--run-id", "r", "--detach", "train.py").returncode == 0
    wait_until(lambda: steps.exists() and steps.read_text(), "the first step")

    again = pbs.start_elsewhere("0.ctl")
    try:
        said = "this process only waits for its end"
        wait_until(lambda: said in muster.said(), "the end of the second head", 60.0)
        wait_until(lambda: len(_writers(steps)) == 2, "the second training", 60.0)
        assert muster.state() == "running"
        (tmp_path / "end").touch()
        assert muster("wait", "r").returncode == 0
        assert again.wait(60.0) == 0
    finally:
        again.kill()
        again.wait()
    first, second = _writers(steps).values()
    assert max(first) < min(second), "never both"
    assert muster.read("result.json")["attempts"] == 2
    assert muster.read("result.json")["state"] == "succeeded"


def _writers(steps):
    found = {}
    for line in steps.read_text().splitlines():
        moment, *_, writer = line.split()
        found.setdefault(writer, []).append(float(moment))
    return found


def _environment_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
