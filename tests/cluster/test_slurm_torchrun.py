"""`muster torchrun` in job scripts of a real Slurm: started once, by srun on every node, and one by one. And bare `srun`."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from cluster.test_torchrun_spreads import TRAIN
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
pytestmark = pytest.mark.netns
LIMIT_S = 150.0
MUSTER = f"{sys.executable} -m torchmuster torchrun"
LINE = f"{MUSTER} --nnodes 2 --rdzv_backend c10d --rdzv_endpoint {{endpoint}}:29500"
STARTED = "torchrun was started on n1 only: started here for n2 too"


@pytest.fixture
def batch(login, slurm_lab):
    """Return a function that submits the commands of a script for nodes n1 and n2; its job's number."""
    login.script(TRAIN)

    def submit(commands, *words):
        exports = " ".join(f"{name}={value}" for name, value in login.env.items())
        text = f"export {exports}\ncd {login.folder}\n{commands}\n"
        return slurm_lab.submit(text, "--nodelist=n1,n2", "--nodes=2", *words)

    def end(job):
        slurm_lab.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED", limit_s=LIMIT_S)
        return slurm_lab.output_of(job)

    submit.end, submit.folder = end, login.folder
    return submit


@pytest.mark.parametrize(
    "endpoint",
    [
        pytest.param("localhost", marks=pytest.mark.lab),
        pytest.param("$(hostname)", marks=pytest.mark.lab),
        "$(hostname -I | awk '{print $1}')",
    ],
)
def test_started_once_trains_on_all_nodes(batch, endpoint):
    text = batch.end(batch(f"{LINE.format(endpoint=endpoint)} train.py\necho ended with $?"))

    assert text.count("sum 2") == 2, text
    assert STARTED in text
    assert "ended with 0" in text


def test_started_by_srun_on_every_node_is_not_spread(batch):
    line = LINE.format(endpoint="$(hostname)")
    text = batch.end(batch(f"srun --ntasks-per-node=1 {line} train.py", "--ntasks-per-node=1"))

    assert text.count("sum 2") == 2, text
    assert "started here" not in text


def test_started_twice_on_every_node_by_srun_is_one_agent_on_each(batch):
    line = LINE.format(endpoint="$(hostname)")
    words = f"srun --ntasks-per-node=2 {line} train.py; echo ended with $?"
    text = batch.end(batch(words, "--ntasks-per-node=2"))

    assert text.count("sum 2") == 2, text
    assert text.count("task 0 has started the same agent") == 2, text
    assert "ended with 0" in text


@pytest.mark.lab
def test_started_one_by_one_is_not_spread(batch):
    line = LINE.format(endpoint="$(hostname)")
    each = f"srun --overlap -N1 -n1 -w $node {line} train.py &"
    text = batch.end(batch(f"for node in n1 n2; do {each} done; wait", "--ntasks-per-node=1"))

    assert text.count("sum 2") == 2, text
    assert "not wanted" not in text


@pytest.mark.lab
def test_agent_that_the_script_starts_too_late_is_sent_away_without_harm(batch):
    line = LINE.format(endpoint="$(hostname)")
    text = batch.end(
        batch(
            f"{line} train.py wait > head.txt 2>&1 &\n"
            "until grep -q 'sum 2 rank 0' head.txt; do :; done\n"
            f"srun --overlap -N1 -n1 -w n2 {line} train.py\necho late $?\nkill %1; wait",
        )
    )

    assert "late 0" in text, text
    assert "the head has started an agent for n2 already: this one is not needed" in text
    assert STARTED in (batch.folder / "head.txt").read_text()


@pytest.mark.lab
def test_no_spread_names_the_node(batch, slurm_lab):
    job = batch(f"exec {LINE.format(endpoint='$(hostname)')} --no-spread train.py")
    wanted = "waiting for n2: no agent has connected; torchrun was started on n1 only?"
    wait_until(lambda: wanted in _output(slurm_lab, job), "the line")
    slurm_lab.run(["scancel", "--full", job])


@pytest.mark.lab
def test_killed_agent_is_started_again(batch, slurm_lab):
    line = LINE.format(endpoint="localhost")
    job = batch(f"{line} --max-restarts 1 train.py wait\necho ended with $?")
    wait_until(lambda: _output(slurm_lab, job).count("attempt 0") == 2, "both workers", 60.0)
    (agent,) = _agents(slurm_lab, "n2")
    os.kill(agent, signal.SIGKILL)
    text = batch.end(job)

    assert "ended with 0" in text, text
    assert len(re.findall("sum 2 .* attempt 1", text)) == 2, text


@pytest.mark.lab
def test_cancelled_job_leaves_nothing_on_the_spread_node(batch, slurm_lab):
    job = batch(f"exec {LINE.format(endpoint='localhost')} train.py wait")
    wait_until(lambda: _output(slurm_lab, job).count("attempt 0") == 2, "both workers", 60.0)
    slurm_lab.run(["scancel", "--full", job])

    for node in ("n1", "n2"):
        wait_until(lambda node=node: not _agents(slurm_lab, node), f"the end on {node}", 60.0)


def _output(lab, job):
    try:
        return lab.output_of(job)
    except FileNotFoundError:
        return ""


def _agents(lab, node):
    ours = [b"-m", b"torchmuster", b"torchrun"]
    return [pid for pid, words in lab.commands_on(node).items() if words[1:4] == ours]


# Without a launcher of ours: bare `srun`, and job scripts of the documentation that people copy.

TOY = Path(__file__).parents[2] / "examples" / "toy_regression" / "train.py"
WEIGHTS = 9
# The job script of the documentation that people copy, with `muster` before torchrun and blanks
# before its backslashes.
TORCHRUN = """
RDV_ADDR=$(hostname)
WORLD_SIZE=$SLURM_JOB_NUM_NODES
srun --ntasks-per-node=1 muster torchrun \\
  --nproc-per-node 2 \\
  --nnodes $WORLD_SIZE \\
  --rdzv-id $SLURM_JOB_ID \\
  --rdzv-backend c10d \\
  --rdzv-endpoint $RDV_ADDR:29500 \\
  {script} --epochs 2
"""
# The other one of the same documentation: one task for each GPU, a port from the job's number.
BARE = """
set -e
export MASTER_PORT=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun python {script} --epochs 2 --snapshots bare
"""


@pytest.fixture(scope="module")
def expected(slurm_lab):
    """Return the weights that one process learns."""
    words = [sys.executable, TOY, "--epochs", 2, "--snapshots", "alone"]
    said = slurm_lab.run(words, limit_s=LIMIT_S)
    found = weights(said.stdout)
    assert len(found) == WEIGHTS, said.stderr
    return found


def test_bare_srun_with_one_task_a_worker_trains(slurm_lab, expected):
    words = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, TOY, "--epochs", 2]
    said = slurm_lab.run([*words, "--snapshots", "interactive"], limit_s=LIMIT_S)
    assert weights(said.stdout) == expected, said.stdout + said.stderr


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        pytest.param(BARE, "--ntasks-per-node=2", id="the head and a port", marks=pytest.mark.lab),
        pytest.param(TORCHRUN, "--ntasks=2", id="srun muster torchrun"),
    ],
)
def test_a_job_script_of_the_documentation_trains(slurm_lab, expected, text, tasks):
    job = slurm_lab.submit(text.format(script=TOY), "--nodes=2", tasks)
    slurm_lab.wait_for_job(job, "COMPLETED", "FAILED", limit_s=LIMIT_S)
    assert weights(slurm_lab.output_of(job)) == expected, slurm_lab.output_of(job)


def weights(text):
    """Return the lines that give the weights: equal to nine digits or a test fails."""
    lines = [line.partition("weight ") for line in text.splitlines()]
    return [values for _, found, values in lines if found]
