"""The job scripts of published tutorials, and what lint finds in each of them, line by line.

The table was written before the code. The tutorials are not part of this project: the test runs wherever they lie, in
a folder `shared/seeds` above this one or in $MUSTER_SEEDS, and is skipped elsewhere.
"""

import os
import re
import textwrap
from pathlib import Path

import pytest

from torchmuster.diagnose.lint.job import parse
from torchmuster.diagnose.lint.lint import lint

EAP, MILA, MILA_JOB = (
    "eap-olivia-pbs-ddp.md",
    "mila-torchrun-slurm.txt",
    "mila-multi-node-ddp.rst",
)
# (line of the script, the words that stand there, level, rule)
SINGLE_GPU = []
ONE_NODE = [(14, "torchrun --standalone", "error", "workers-without-gpu")]
MULTI_NODE = [
    (4, "#PBS -l select=2:ncpus=288", "warning", "no-gpus-requested"),
    (36, "head_node_ip=", "warning", "first-address"),
    (41, "ping -c 1", "note", "ping-to-itself"),
    (50, "torchrun --nnodes=2", "error", "head-only"),
]
MULTI_NODE_OFI = [
    (4, "#PBS -l select=2:ncpus=288", "warning", "no-gpus-requested"),
    (29, "export LD_LIBRARY_PATH=$NCCL_ROOT", "warning", "own-nccl"),
    (41, 'export FI_PROVIDER="efa"', "error", "efa-provider"),
    (56, "head_node_ip=", "warning", "first-address"),
    (61, "ping -c 1", "note", "ping-to-itself"),
    (69, "torchrun --nnodes=2", "error", "head-only"),
]
TWO_MACHINES = []
MILA_TORCHRUN = [
    (7, "#SBATCH --gres=gpu:4", "warning", "gres-beside-gpus"),
    (21, "WORLD_SIZE=$SLURM_JOB_NUM_NODES", "note", "world-size-of-nodes"),
    (23, "srun --label torchrun", "note", "no-time-limit"),
    (24, "--nproc_per_node=$SLURM_GPUS_PER_NODE\\", "error", "glued-continuation"),
]
MILA_TASKS = [(25, "srun uv run python main.py", "warning", "cpus-not-inherited")]


def _seed(name):
    folders = [Path(os.environ.get("MUSTER_SEEDS", "/nowhere"))]
    folders += [parent / "shared" / "seeds" for parent in Path(__file__).parents]
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        pytest.skip(f"{name} is not here")
    return path.read_text()


def _scripts_of_eap():
    """Return every shell script of the tutorial, and its torchrun lines for two machines."""
    pattern = r"^((?:#!/bin/bash|torchrun \\)\n.*?)^`{3,}$"
    return re.findall(pattern, _seed(EAP), re.DOTALL | re.MULTILINE)


def _script_of_mila():
    text = _seed(MILA)
    return text[text.index("#!/bin/bash") : text.index("You can find below")]


def _script_of_mila_job():
    """Return `job.sh` as the difference leaves it."""
    text = _seed(MILA_JOB)
    block = text.split("**job.sh**")[1].split("**pyproject.toml**")[0].split(":: diff\n")[1]
    lines = [line[3:] for line in block.split("\n") if line[3:4] != "-"]
    plain = "\n".join(line[1:] for line in lines)
    return textwrap.dedent(plain[plain.index("#!/bin/bash") :])


def _check(text, expected):
    found = [(f.line, f.word, f.cause) for f in lint(parse(text, "job.sh"))]
    assert found == [(line, level, rule) for line, _, level, rule in expected]
    lines = text.split("\n")
    for line, words, _, _ in expected:
        assert words in lines[line - 1]


@pytest.mark.parametrize(
    ("position", "expected"),
    [(0, SINGLE_GPU), (1, ONE_NODE), (2, TWO_MACHINES), (3, MULTI_NODE), (4, MULTI_NODE_OFI)],
    ids=["single GPU", "one node", "two machines", "multi-node", "multi-node with OFI"],
)
def test_the_scripts_of_the_pbs_tutorial_have_the_findings_of_the_table(position, expected):
    scripts = _scripts_of_eap()

    assert len(scripts) == 5
    _check(scripts[position], expected)


def test_the_torchrun_script_for_slurm_has_the_findings_of_the_table():
    _check(_script_of_mila(), MILA_TORCHRUN)


def test_the_script_with_one_task_per_gpu_has_one_warning():
    _check(_script_of_mila_job(), MILA_TASKS)
