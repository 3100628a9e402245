"""The Slurm lab does what a cluster does, and leaves nothing on the machine that it runs on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.conftest import need_slurm
from cluster.slurm_lab import SlurmLab, why_not
from kit.command import SOURCE
from kit.footprint import inside, machine
from kit.waiting import wait_until
from kit.world import MACHINE_PATH

pytestmark = pytest.mark.netns
NOBODY = 65534
OURS = ("slurm", "munge", "netns")
TESTS = Path(__file__).parents[1]
KILLED_TEST = """
import json, os, signal
from pathlib import Path
from cluster.slurm_lab import SlurmLab

def test_that_is_killed():
    with SlurmLab(2) as lab:
        job = lab.submit("srun sleep 1000", "-N2")
        lab.wait_for_job(job, "RUNNING")
        pids = list(lab.pids.values())
        space = os.readlink(f"/proc/{pids[0]}/ns/pid")
        told = Path(os.environ["TOLD"])
        told.with_suffix(".new").write_text(json.dumps([str(lab.folder), space, pids]))
        told.with_suffix(".new").rename(told)
        if os.environ["STAY"] == "1":
            signal.pause()
"""


def test_a_batch_script_runs_on_two_nodes(slurm_lab):
    job = slurm_lab.submit("hostname; srun -l hostname", "-N2", "--ntasks-per-node=1")
    slurm_lab.wait_for_job(job, "COMPLETED")
    assert sorted(slurm_lab.output_of(job).split("\n")) == ["", "0: n1", "1: n2", "n1"]


def test_srun_gives_each_task_its_node_address_and_gpus(slurm_lab):
    show = "echo $(hostname) $(getent hosts $(hostname) | cut -d' ' -f1) $CUDA_VISIBLE_DEVICES"
    said = slurm_lab.run(["srun", "-N2", "--gres=gpu:2", "bash", "-c", show])
    assert said.returncode == 0, said.stderr
    assert sorted(said.stdout.splitlines()) == ["n1 10.88.0.1 0,1", "n2 10.88.0.2 0,1"]


def test_one_gpu_each_are_different_gpus(slurm_lab):
    words = ["srun", "-N1", "-n2", "--gpus-per-task=1", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    said = slurm_lab.run(words)
    assert said.returncode == 0, said.stderr
    assert sorted(said.stdout.split()) == ["0", "1"]


def test_nodes_reach_each_other_by_name_and_not_the_host(slurm_lab):
    said = slurm_lab.run(["ip", "-o", "link"], on="n1")
    names = [line.split(":")[1].strip().partition("@")[0] for line in said.stdout.splitlines()]
    assert names == ["lo", "eth0"]
    listen = "import socket; s = socket.create_server(('', 4711)); s.accept()[0].send(b'yes')"
    ask = "import socket; print(socket.create_connection(('n1', 4711), 10).recv(3).decode())"
    with slurm_lab.popen([sys.executable, "-c", listen], on="n1") as server:
        said = wait_until(
            lambda: slurm_lab.run([sys.executable, "-c", ask], on="n2").stdout, "an answer"
        )
        assert server.wait(10) == 0
    assert said == "yes\n"


def test_a_job_of_another_user_runs_as_that_user(slurm_lab):
    job = slurm_lab.submit("srun id -u; touch mine", "-N2", uid=NOBODY)
    slurm_lab.wait_for_job(job, "COMPLETED")
    assert slurm_lab.output_of(job).split() == [str(NOBODY)] * 2
    assert (slurm_lab.shared / "mine").stat().st_uid == NOBODY


def test_scancel_ends_all_processes_of_a_job(slurm_lab):
    job = slurm_lab.submit("srun sleep 1000", "-N2")
    wait_until(lambda: all(len(processes(slurm_lab, n, "sleep")) == 1 for n in ("n1", "n2")), "it")
    slurm_lab.run(["scancel", job])
    slurm_lab.wait_for_job(job, "CANCELLED")
    slurm_lab.wait_for_nodes("n1", "n2")
    assert not processes(slurm_lab, "n1", "sleep")
    assert not processes(slurm_lab, "n2", "sleep")


@pytest.mark.lab
def test_a_killed_node_fails_its_job_and_comes_back(slurm_lab):
    job = slurm_lab.submit("srun sleep 1000", "-N2", "--no-requeue")
    wait_until(lambda: processes(slurm_lab, "n2", "sleep"), "the step on n2")
    slurm_lab.kill_node("n2")
    assert not slurm_lab.processes_on("n2")
    slurm_lab.wait_for_job(job, "NODE_FAIL", "FAILED", limit_s=90.0)
    slurm_lab.restore_node("n2")
    assert slurm_lab.run(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"


@pytest.mark.lab
def test_a_job_with_requeue_runs_again_when_its_node_dies(slurm_lab):
    script = 'echo "start ${SLURM_RESTART_COUNT:-0}"; [ "$SLURM_RESTART_COUNT" ] || sleep 1000'
    job = slurm_lab.submit(script, "-w", "n2", "--requeue", "--open-mode=append")
    wait_until(lambda: "start 0" in slurm_lab.output_of(job), "the first start")
    slurm_lab.kill_node("n2", unplug=True)
    slurm_lab.wait_for_nodes("n2", states=("down", "down*"), limit_s=60.0)
    slurm_lab.restore_node("n2")
    slurm_lab.wait_for_job(job, "COMPLETED", limit_s=90.0)
    starts = [line for line in slurm_lab.output_of(job).splitlines() if line.startswith("start")]
    assert starts == ["start 0", "start 1"]
    assert slurm_lab.job(job)["Restarts"] == "1"


@pytest.mark.slow
@pytest.mark.lab
def test_a_time_limit_signals_and_then_ends_a_job(slurm_lab):
    script = "trap 'echo warned' USR1; sleep 1000 & wait; wait; wait"
    job = slurm_lab.submit(script, "--time=1", "--signal=B:USR1@20")
    slurm_lab.wait_for_job(job, "TIMEOUT", limit_s=170.0)
    assert "warned" in slurm_lab.output_of(job)


def test_killing_a_command_on_the_login_node_ends_it(slurm_lab):
    with slurm_lab.popen(["sleep", "4711"]) as child:
        wait_until(lambda: processes(slurm_lab, "login", "sleep"), "the command")
        child.kill()
    wait_until(lambda: not processes(slurm_lab, "login", "sleep"), "its end")
    with slurm_lab.popen(["sleep", "4711"]) as child:
        wait_until(lambda: processes(slurm_lab, "login", "sleep"), "the command")
        child.send_signal(signal.SIGTERM)
    assert child.returncode == -signal.SIGTERM


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "sigkill_of_pytest"])
def test_a_lab_leaves_nothing_on_the_machine(tmp_path, killed):
    need_slurm()
    (tmp_path / "test_it.py").write_text(KILLED_TEST)
    told = tmp_path / "told"
    before = machine(OURS)
    paths = {"PYTHONPATH": f"{SOURCE}:{TESTS}", "TOLD": str(told), "STAY": str(int(killed))}
    paths["PATH"] = MACHINE_PATH  # the lab in there needs the machine's own Slurm
    words = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", tmp_path]
    words += ["-p", "no:cacheprovider", tmp_path / "test_it.py"]
    with subprocess.Popen(words, env=os.environ | paths, cwd=tmp_path) as child:
        wait_until(lambda: told.exists() or child.poll() is not None, "the lab")
        if killed:
            child.kill()
    assert child.returncode == (-signal.SIGKILL if killed else 0)
    folder, space, pids = json.loads(told.read_text())
    wait_until(lambda: not inside(folder, pids, space), "the end of its processes")
    wait_until(lambda: not os.path.exists(folder), "the end of its folder")
    wait_until(
        lambda: not machine(OURS) - before, "the host to be as before", 90.0
    )  # other tests may have links too


def test_a_lab_ends_when_the_process_that_holds_it_is_killed():
    need_slurm()
    with SlurmLab(1) as lab:
        space = os.readlink(f"/proc/{lab.pids['login']}/ns/pid")
        assert inside(str(lab.folder), lab.pids.values(), space)  # it can be seen at all
        lab.house.kill()
        wait_until(lambda: not inside(str(lab.folder), lab.pids.values(), space), "its end", 30.0)
    assert not lab.folder.exists()


@pytest.mark.parametrize("etc", ["slurm/slurm.conf", "slurm-llnl/slurm.conf"])
def test_no_lab_starts_beside_a_configuration_of_someone(tmp_path, etc):
    path = tmp_path / etc
    path.parent.mkdir()
    path.touch()
    assert str(path) in (refused(etc=tmp_path) or "")


@pytest.mark.parametrize("name", ["slurmd", "slurmctld"])
def test_no_lab_starts_beside_a_daemon_of_someone(tmp_path, name):
    for pid in ("self", "4711"):
        (tmp_path / "proc" / pid / "ns").mkdir(parents=True)
        (tmp_path / "proc" / pid / "ns" / "pid").symlink_to("pid:[1]")
    (tmp_path / "proc" / "4711" / "comm").write_text(f"{name}\n")
    assert f"{name} (pid 4711)" in refused(etc=tmp_path, proc=tmp_path / "proc")


@pytest.mark.parametrize("name", ["SLURM_CONF", "SLURM_JOB_ID"])
def test_no_lab_starts_in_a_shell_of_a_cluster(tmp_path, name):
    assert name in refused({name: "1"}, etc=tmp_path)


def test_the_daemons_of_one_lab_do_not_refuse_another(slurm_lab):
    assert slurm_lab.daemons["slurmctld"].poll() is None
    assert why_not() is None


def refused(environ=(), **places):
    reason = why_not(dict(environ), **places)
    if os.geteuid() != 0 or "apt-get" in (reason or ""):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    return reason


def processes(lab, host_name, name):
    """Return the pids of the commands of this name on one of the lab's hosts."""
    found = []
    for pid in lab.processes_on(host_name):
        try:
            comm = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        found += [pid] if comm == name else []
    return found
