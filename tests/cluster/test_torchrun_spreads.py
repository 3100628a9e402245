"""`muster torchrun`, started on one host of a job: the head starts the others, or says who is missing."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit.command import SOURCE
from kit.ports import reserve_port
from kit.waiting import wait_until

SEED = Path(__file__).parents[3] / "shared" / "seeds" / "eap-olivia-pbs-ddp.md"
TRAIN = """
import os, signal, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
os.write(1, f"sum {int(ones.item())} rank {rank} attempt {attempt} words {sys.argv[1:]}\\n".encode())
if "wait" in sys.argv[1:] and attempt == "0":
    signal.pause()
dist.barrier()
"""
# Our own script of the same kind as the seed's: the variables, the two lines of hosts, torchrun once.
SCRIPT = """#!/bin/bash
#PBS -N ddp
#PBS -j oe
#PBS -l select=2:ncpus=4:mpiprocs=2:sales_op=blanca,walltime=0:05:00,place=scatter
#PBS -q workq
source {folder}/activate
export GREETING="hello from the script"
nodes=($(sort $PBS_NODEFILE | uniq))
head_node_ip=$(hostname -I | awk '{{print $1}}')
torchrun --nnodes=2 --nproc_per_node=2 --rdzv_id=$RANDOM --rdzv_backend=c10d \
 --rdzv_endpoint=$head_node_ip:{port} {folder}/train.py 50 10
"""
MUSTER = f"{sys.executable} -m torchmuster"
STARTED = "torchrun was started on n1 only: started here for n2 too"


@pytest.fixture
def site(pbs, tmp_path, free_port):
    """Return a function that runs a script of PBS in which `torchrun` is ours, and returns (job's view, output)."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "activate").write_text(
        f"export PYTHONPATH={SOURCE} MUSTER_HOME={tmp_path}/home\n"
        f'torchrun() {{ {MUSTER} torchrun "$@"; }}\ndeactivate() {{ :; }}\nmodule() {{ :; }}\n'
    )

    def run(text, *, wait=True):
        path = tmp_path / "job.sh"
        path.write_text(text)
        done = pbs.call("qsub", str(path))
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        if not wait:
            return job
        view = pbs.wait(job, "F", 120.0)
        return view, pbs.output(job)

    run.folder, run.port, run.pbs = tmp_path, free_port, pbs
    run.live_output = lambda job: (pbs.state / "spool" / f"{job}.OU").read_text()
    return run


def line(site, words="", script="", endpoint="127.0.0.1"):
    """Return a script with this one line of torchrun."""
    return (
        "#!/bin/bash\n#PBS -j oe\n#PBS -l select=2:ncpus=2:mpiprocs=1 -l place=scatter\n"
        f"source {site.folder}/activate\n"
        f"torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint {endpoint}:{site.port}"
        f" {words} {site.folder}/train.py {script}\n"
    )


@pytest.fixture
def free_port():
    """Return a port that nobody listens on."""
    return reserve_port()


def test_the_multi_node_script_with_one_word_changed_trains_on_two_hosts(site):
    view, text = site(SCRIPT.format(folder=site.folder, port=site.port))

    assert view["Exit_status"] == 0, text
    assert text.count("sum 4") == 4, text
    assert "words ['50', '10']" in text
    assert f"{STARTED} (--no-spread leaves that to you)" in text


@pytest.mark.skipif(not SEED.exists(), reason="the seeds are not there")
@pytest.mark.parametrize("number", [0, 1])
def test_the_scripts_of_the_tutorial_train_on_two_hosts(site, number):
    blocks = re.findall(r"````bash\n(#!/bin/bash\n.*?)````", SEED.read_text(), re.DOTALL)
    script = [block for block in blocks if "--nnodes=2" in block and "PBS_NODEFILE" in block][
        number
    ]
    site.pbs.settings(
        hosts={n: {"ncpus": 288, "ngpus": 4} for n in ("n1", "n2")}, queues=["workq", "blanca"]
    )
    folder = site.folder / "bin"
    folder.mkdir()
    # What the script asks of its surroundings: an ssh that is not asked, a ping, an environment.
    for name, answer in (("ssh", "hostname -I | awk '{print $1}'"), ("ping", "true")):
        (folder / name).write_text(f"#!/bin/bash\n{answer}\n")
        (folder / name).chmod(0o755)
    script = script.replace("<your-username>", "me")
    script = re.sub(r"\nsource \S+", f"\nsource {site.folder}/activate", script)
    script = script.replace("# Get node information", f"PATH={folder}:$PATH")
    script = re.sub(r"/home/users/\S+\.py", f"{site.folder}/train.py", script)
    script = script.replace(":29500", f":{site.port}").replace(
        "#PBS -N ddp", "#PBS -N ddp\n#PBS -j oe"
    )
    script = script.replace("export NCCL_SOCKET_IFNAME=hsn0", "")
    view, text = site(script)

    assert view["Exit_status"] == 0, text
    assert text.count("sum 4") == 4, text
    assert STARTED in text


@pytest.mark.lab
@pytest.mark.parametrize("endpoint", ["localhost", ""])
def test_an_endpoint_of_loopback_is_not_what_the_others_call(site, endpoint):
    _, text = site(line(site, endpoint=endpoint))

    assert text.count("sum 2") == 2, text


@pytest.mark.lab
def test_an_endpoint_that_names_another_host_of_the_job_still_trains(site):
    # 192.0.2.0/24 is nobody's: what the script took for the head is not where it runs.
    _, text = site(line(site, endpoint="192.0.2.7"))

    assert text.count("sum 2") == 2, text


@pytest.mark.lab
def test_a_static_line_gets_its_ranks(site):
    text = line(site).replace("c10d", "static").replace("--nnodes 2", "--nnodes 2 --node_rank 0")
    _, text = site(text)

    assert text.count("sum 2") == 2, text
    assert "rank 1 attempt 0" in text


def test_no_spread_names_the_missing_host_while_it_is_waited_for(site):
    job = site(line(site, "--no-spread"), wait=False)
    wait_until(lambda: "waiting for n2: no agent has connected" in _text(site, job), "the name")
    text = _text(site, job)

    assert "torchrun was started on n1 only?" in text
    assert STARTED not in text


@pytest.mark.lab
def test_hosts_that_the_script_starts_itself_are_left_to_it(site):
    text = line(site).replace("\ntorchrun ", "\ncat > $HOME/task.sh <<'EOF'\n")
    head, _, rest = text.partition("cat > $HOME/task.sh <<'EOF'\n")
    body = f"#!/bin/bash\nsource {site.folder}/activate\ntorchrun {rest}EOF\n"
    script = f"{head}cat > $HOME/task.sh <<'EOF'\n{body}chmod +x $HOME/task.sh\npbsdsh -- $HOME/task.sh\n"
    _, text = site(script)

    assert text.count("sum 2") == 2, text
    assert STARTED not in text
    assert "refused" not in text


def test_more_nodes_than_the_job_has_is_an_error_at_once(site):
    view, text = site(line(site).replace("--nnodes 2", "--nnodes 3"))

    assert view["Exit_status"] == 2
    assert "--nnodes asks for 3 nodes, the job has 2" in text
    assert "its hosts are n1, n2" in text


@pytest.mark.lab
def test_a_range_of_nodes_is_cut_to_the_jobs_hosts(site):
    # Who waits for the last call does not end in the time that the test has.
    words = "--nnodes 1:4 --rdzv_conf last_call_timeout=3600"
    _, text = site(line(site).replace("--nnodes 2", words))

    assert text.count("sum 2") == 2, text
    assert "--nnodes allows 4 nodes, job 0.ctl of pbs has 2: n1, n2" in text


def test_a_killed_agent_that_was_spread_is_started_again(site):
    job = site(line(site, "--max-restarts 1", "wait"), wait=False)
    wait_until(lambda: _text(site, job).count("attempt 0") == 2, "both workers", 60.0)
    os.kill(_spread_agent(site.pbs, job), signal.SIGKILL)
    view = site.pbs.wait(job, "F", 90.0)
    text = site.pbs.output(job)

    assert view["Exit_status"] == 0, text
    assert "n2 was lost" in text
    assert text.count("sum 2 rank") == 4, text


@pytest.mark.lab
def test_the_end_of_the_head_ends_what_it_has_spread(site):
    job = site(line(site, "", "wait"), wait=False)
    wait_until(lambda: _text(site, job).count("attempt 0") == 2, "both workers", 60.0)
    agent = _spread_agent(site.pbs, job)
    head = next(pid for pid in _agents(site.pbs) if pid != agent)
    os.kill(head, signal.SIGKILL)

    wait_until(lambda: not Path(f"/proc/{agent}").exists(), "the end of n2's agent")
    assert site.pbs.wait(job)["Exit_status"] == 137


@pytest.mark.lab
def test_a_failure_on_the_spread_host_is_the_verdict_of_the_job(site):
    (site.folder / "train.py").write_text(TRAIN + "\nassert rank == 0, 'no luck'\n")
    view, text = site(line(site))

    assert view["Exit_status"] == 1
    assert "AssertionError: no luck" in text
    assert "on n2" in text


def test_what_the_script_exports_reaches_the_spread_host_and_is_removed(site):
    (site.folder / "train.py").write_text(
        "import os; os.write(1, f\"{os.environ['WORD']} in {os.getcwd()}\\n\".encode())"
    )
    text = line(site).replace(
        "\ntorchrun", f"\nexport WORD='two  words'; cd {site.folder}\ntorchrun"
    )
    _, text = site(text)

    assert text.count(f"two  words in {site.folder}\n") == 2, text
    assert not list(site.folder.glob("home/runs/*/environment.json"))


def _text(site, job):
    try:
        return site.live_output(job)
    except FileNotFoundError:
        return ""


def _agents(pbs):
    found = []
    for pid in pbs.processes():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[1:4] == [b"-m", b"torchmuster", b"torchrun"]:
            found.append(pid)
    return found


def _spread_agent(pbs, job):
    there = pbs.pids_of(job, "n2")  # each leads the session of a task
    return next(pid for pid in _agents(pbs) if os.getsid(pid) in there)


SBATCH = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output={folder}/out.txt
export PYTHONPATH={source} MUSTER_HOME={folder}/home OMP_NUM_THREADS=1
{launcher} {muster} torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d \
  --rdzv_endpoint {endpoint}:{port} {folder}/train.py
echo "ended with $?"
"""


def test_sbatch_without_srun_trains_on_all_its_nodes(cluster, tmp_path, free_port):
    (tmp_path / "train.py").write_text(TRAIN)
    values = {"folder": tmp_path, "source": SOURCE, "muster": MUSTER, "port": free_port}
    text = SBATCH.format(launcher="", endpoint="127.0.0.1", **values)
    (tmp_path / "job.sh").write_text(text)
    subprocess.run(["sbatch", str(tmp_path / "job.sh")], env=cluster.env, check=True, timeout=30)
    out = tmp_path / "out.txt"
    wait_until(lambda: "ended with" in out.read_text(), "the end of the script", 90.0)
    text = out.read_text()

    assert "ended with 0" in text, text
    assert text.count("sum 2") == 2, text
    assert "torchrun was started on node1 only: started here for node2 too" in text
