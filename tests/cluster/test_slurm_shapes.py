"""What a run gets of a real Slurm: its nodes, uneven workers, GPUs, CPUs, and the job that a shell is in."""

import os
import signal
import subprocess
import sys

import pytest

from kit.waiting import wait_until

pytestmark = pytest.mark.netns
# Each rank says where it is, in one write.
SAY = """
import os
e = os.environ
mask = ",".join(map(str, sorted(os.sched_getaffinity(0))))
words = [e["RANK"], e["WORLD_SIZE"], e["LOCAL_RANK"], os.uname().nodename, e.get("CUDA_VISIBLE_DEVICES", "-")]
os.write(1, f"here {' '.join(words)} {mask}\\n".encode())
"""
ON = ("run", "--on", "slurm", "--tee", "all", "--run-id", "r")


@pytest.fixture(autouse=True)
def _script(login):
    login.script(SAY)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        pytest.param(
            ("--nodes", "3", "--nproc-per-node", "1"),
            [["0", "3", "0", "n1"], ["1", "3", "0", "n2"], ["2", "3", "0", "n3"]],
            id="three nodes share one run",
        ),
        pytest.param(
            ("--nodes", "2", "--nproc-per-node", "2,1"),
            [["0", "3", "0", "n1"], ["1", "3", "1", "n1"], ["2", "3", "0", "n2"]],
            id="uneven numbers of workers",
            marks=pytest.mark.lab,
        ),
    ],
)
def test_nodes_have_as_many_workers_as_the_command_line_says(login, words, ranks):
    done = login(*ON, *words, "train.py")

    assert done.returncode == 0, done.stderr
    assert [rank[:4] for rank in said(done.stdout)] == ranks


def test_workers_see_the_gpus_that_slurm_gave_to_their_node(login):
    done = login(*ON, "--nodes", "2", "--gpus-per-node", "2", "train.py")

    assert done.returncode == 0, done.stderr
    found = said(done.stdout)
    assert [rank[:4] for rank in found] == [
        ["0", "4", "0", "n1"],
        ["1", "4", "1", "n1"],
        ["2", "4", "0", "n2"],
        ["3", "4", "1", "n2"],
    ]
    assert {rank[4] for rank in found} == {"0,1"}


@pytest.mark.parametrize("num_cpus", [pytest.param(1, marks=pytest.mark.lab), 2])
def test_workers_may_use_all_cpus_of_the_job_on_their_node_and_no_others(
    login, slurm_lab, num_cpus
):
    if not set(range(num_cpus)) <= os.sched_getaffinity(0):
        pytest.skip(f"Slurm's first {num_cpus} CPUs are not all ours")
    shape = ("--nodes", "2", "--nproc-per-node", "2", "--cpus-per-node", num_cpus)
    done = login(*ON, *shape, "train.py")

    assert done.returncode == 0, done.stderr
    assert [rank[5] for rank in said(done.stdout)] == [",".join(map(str, range(num_cpus)))] * 4
    job = slurm_lab.job(login.job())
    assert (job["CPUs/Task"], job["NumCPUs"]) == (str(num_cpus), str(2 * num_cpus))


def test_a_job_script_of_ones_own_uses_its_nodes(login, slurm_lab):
    script = f"cd {login.folder}; export MUSTER_HOME={login.folder}/home\n"
    script += "muster run --nproc-per-node 1 --tee all train.py"
    job = slurm_lab.submit(script, "-N2", "--ntasks-per-node=1")
    slurm_lab.wait_for_job(job, "COMPLETED", "FAILED")

    found = [rank[:4] for rank in said(slurm_lab.output_of(job))]
    assert found == [["0", "2", "0", "n1"], ["1", "2", "0", "n2"]], slurm_lab.output_of(job)


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param("srun -N2 --ntasks-per-node=1", id="srun"),
        pytest.param("salloc -N2 srun -N1 -n1 --overlap", id="salloc", marks=pytest.mark.lab),
    ],
)
def test_a_shell_on_a_node_uses_the_nodes_of_its_job(login, shell):
    words = [*shell.split(), "--pty", "bash", "--norc", "-i"]
    done, screen = typed(login, words, "muster run --nproc-per-node 1 --tee all train.py")

    assert done == 0, screen
    found = [rank[:4] for rank in said(screen)]
    assert found == [["0", "2", "0", "n1"], ["1", "2", "0", "n2"]], screen


def test_a_pending_job_says_why_it_waits_and_until_when(login, slurm_lab):
    blocker = slurm_lab.submit("sleep 1000", "-N3", "--exclusive", "--time=5")
    slurm_lab.wait_for_job(blocker, "RUNNING")
    words = ("run", "--on", "slurm", "--nodes", "2", "--time", "2m", "--run-id", "r", "--detach")
    assert login(*words, "train.py").returncode == 0
    job = login.job()
    wait_until(lambda: slurm_lab.job(job)["Reason"] == "Resources", "the reason")
    wait_until(lambda: slurm_lab.job(job)["StartTime"] != "Unknown", "the estimate")
    estimate = slurm_lab.job(job)["StartTime"]

    shown = login("status", "r").stdout

    assert f"job {job} is pending: it is its turn" in shown
    assert f"(Resources), expected to start {estimate}" in shown
    assert login("cancel", "r").returncode == 0
    assert login.state() == "cancelled"


def test_where_nothing_keeps_accounts_the_end_comes_from_the_controller(login, slurm_lab):
    assert slurm_lab.run(["sacct", "-j", "1"]).returncode != 0
    login.script("import signal; print(1, flush=True); signal.pause()")
    words = ("run", "--on", "slurm", "--run-id", "r", "--detach", "train.py")
    assert login(*words).returncode == 0
    job = login.job()
    slurm_lab.wait_for_job(job, "RUNNING")
    login.wait_for("")
    # Killed at once, so that no result is written: only the controller knows of the end.
    for pid, words in slurm_lab.commands_on("n1").items():
        if b"conduct" in b" ".join(words):
            os.kill(pid, signal.SIGKILL)
    slurm_lab.wait_for_job(job, "FAILED")

    shown = login.status()

    assert (shown["state"], shown["result"]) == ("lost", None)
    assert shown["job"]["state"] == "failed"
    assert login("wait", "r").returncode != 0


def said(text):
    """Return what the ranks said, by rank."""
    found = [line.partition("here ")[2].split() for line in text.splitlines() if "here " in line]
    return sorted((words for words in found if len(words) == 6), key=lambda words: int(words[0]))


def typed(login, shell, line):
    """Type a line into a shell that needs a terminal; return its exit code and what was on the screen."""
    end = f"cd {login.folder}; {line}; exit $?\n"
    with login.popen(
        [sys.executable, "-c", TERMINAL, *shell],
        cwd=None,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as child:
        screen, _ = child.communicate(end.encode(), timeout=120.0)
    return child.returncode, screen.decode(errors="replace")


TERMINAL = """
import os, pty, sys
line = sys.stdin.buffer.read()
told = []
def screen(fd):
    data = os.read(fd, 1024)
    if not told:  # the shell has shown its prompt: it reads
        told.append(os.write(fd, line))
    return data
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:], screen, lambda fd: os.read(fd, 1024))))
"""
