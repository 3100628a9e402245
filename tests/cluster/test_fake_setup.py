"""Setup lines, interpreters and staged data on the hosts of pretended Slurm and PBS clusters."""

import sys
from pathlib import Path

import pytest

from cluster.test_fake_pbs_runs import muster as on_pbs
from cluster.test_fake_slurm import cluster, muster
from kit.command import ran
from kit.venvs import make_venv

__all__ = ["cluster", "on_pbs"]
SHOW = """
import importlib.util, os, sys
rank = os.environ["RANK"]
known = importlib.util.find_spec("torchmuster") is not None
import torch
there = sorted(os.listdir(os.environ["MUSTER_SCRATCH"]))
text = f"rank {rank} prefix {sys.prefix} torchmuster {known} loaded {os.environ.get('LOADED')} there {there}"
os.write(1, (text + chr(10)).encode())
"""


@pytest.fixture
def jobs_own(tmp_path):
    """Return an environment with torch but without torchmuster: links to the packages of ours."""
    return make_venv(tmp_path / "jobs own")


def site(folder, kind, *lines):
    quoted = ", ".join(f"'''{line}'''" for line in lines)
    (folder / "muster.toml").write_text(f'[engines.here]\nkind = "{kind}"\nsetup = [{quoted}]\n')
    (folder / "show.py").write_text(SHOW)


@pytest.fixture(params=["slurm", "pbs"])
def submit(request, tmp_path):
    """Return a function that runs on two hosts of a pretended scheduler, and the scheduler's kind."""
    if request.param == "pbs":
        call = request.getfixturevalue("on_pbs")
    else:
        environment = request.getfixturevalue("cluster")

        def call(*words):
            return muster(environment, tmp_path, *words)

    def run(*words):
        fixed = ("--on", "here", "--nodes", "2", "--nproc-per-node", "1", "--run-id", "r")
        return call("run", *fixed, "--tee", "all", *words)

    run.kind = request.param
    return run


def test_an_environment_without_torchmuster_trains_on_every_host(submit, tmp_path, jobs_own):
    site(
        tmp_path,
        submit.kind,
        "unset PYTHONPATH",
        f"source '{jobs_own}/bin/activate'",
        "export LOADED=yes",
    )
    done = submit("show.py")

    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} prefix {jobs_own} torchmuster False loaded yes" in done.stdout
    assert "the setup lines put it on PATH" in done.stderr


def test_a_failing_module_is_named_with_node_line_and_output(submit, tmp_path):
    line = 'module() { echo "no module $2" >&2; return 1; }'
    site(tmp_path, submit.kind, line, "module load cuda/99")
    done = submit("show.py")

    assert done.returncode == 1
    assert "error: a setup line failed on n" in done.stderr
    assert "muster.toml [engines.here] setup, line 2: module load cuda/99" in done.stderr
    assert "no module cuda/99" in done.stderr
    assert "rank" not in done.stdout


def test_data_is_staged_on_every_host(submit, tmp_path):
    site(tmp_path, submit.kind, "true")
    (tmp_path / "data").mkdir()
    done = submit("--stage", "data", "--before", "test -d $MUSTER_SCRATCH/data", "show.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'data']") == 2


def test_a_python_of_another_processor_on_the_first_node_is_replaced(cluster, tmp_path):
    site(tmp_path, "slurm", f"export PATH={Path(sys.executable).parent}:$PATH")
    shown = muster(cluster, tmp_path, "run", "--on", "here", "--dry-run", "show.py").stdout
    script = shown[shown.index("#!") :].replace(f"PYTHON={sys.executable}", "PYTHON=/nope/python3")
    head = script.rindex("exec ")
    (tmp_path / "job.sh").write_text(script[:head] + 'echo "chosen $PYTHON"\n')
    done = ran(["bash", str(tmp_path / "job.sh")], limit_s=30)
    said = done.stdout + done.stderr

    assert "muster: /nope/python3 does not run on" in said
    assert f"chosen {Path(sys.executable).parent}/python3" in said
