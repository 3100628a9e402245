"""What a site is like: setup lines, interpreters and staged data on pretended hosts, and what `muster engines check` says of it."""

import json
import os
import sys
from pathlib import Path

import pytest

from kit.command import ran
from kit.venvs import make_venv

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
def submit(request):
    """Return a function that runs on two hosts of a pretended scheduler, and the scheduler's kind."""
    if request.param == "pbs":
        call = request.getfixturevalue("pbs").muster
    else:
        call = request.getfixturevalue("cluster")

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
    shown = cluster("run", "--on", "here", "--dry-run", "show.py").stdout
    script = shown[shown.index("#!") :].replace(f"PYTHON={sys.executable}", "PYTHON=/nope/python3")
    head = script.rindex("exec ")
    (tmp_path / "job.sh").write_text(script[:head] + 'echo "chosen $PYTHON"\n')
    done = ran(["bash", str(tmp_path / "job.sh")], limit_s=30)
    said = done.stdout + done.stderr

    assert "muster: /nope/python3 does not run on" in said
    assert f"chosen {Path(sys.executable).parent}/python3" in said


# `muster engines check` with a test job.


@pytest.fixture
def checked(cluster, tmp_path):
    """Return a pretended Slurm whose sinfo answers too."""
    (tmp_path / "bin").mkdir()
    answers = {"sinfo": "echo 'main*|up|1:00:00|2|2|1000|(null)'", "sacctmgr": "exit 1"}
    put_commands(tmp_path / "bin", answers)
    cluster.env["PATH"] = f"{tmp_path}/bin:{cluster.env['PATH']}"
    return cluster


def put_commands(folder, commands):
    """Write scripts by their names."""
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def check(checked, *words):
    done = checked("engines", "check", "slurm", "--json", *words)
    rows = {row["check"]: row for row in json.loads(done.stdout)["checks"]}
    return done, rows


def test_the_test_job_tells_what_its_node_has(checked, tmp_path):
    done, rows = check(checked)

    assert done.returncode == 0, done.stderr
    assert "s from submission to start" in rows["test job"]["found"]
    assert rows["processor"]["found"] == f"{os.uname().machine}, as here"
    assert sys.executable in rows["python"]["found"]
    assert rows["torch"]["ok"] is True
    assert rows["working directory"] == {
        "check": "working directory",
        "ok": True,
        "found": f"{tmp_path} is there too",
    }
    assert "job 1 is running" in done.stderr


def test_without_a_job_nothing_is_submitted(checked, tmp_path):
    done, rows = check(checked, "--no-job")

    assert done.returncode == 0, done.stderr
    assert "test job" not in rows
    assert not list((tmp_path / "queue").glob("*.json"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        pytest.param(
            "directives = ['--partition=nope']", "Slurm knows no such partition", id="is refused"
        ),
        pytest.param(
            "setup = ['echo no such module >&2; exit 3']", "no such module", id="can not work"
        ),
    ],
)
def test_a_test_job_that_fails_shows_why(checked, tmp_path, line, why):
    (tmp_path / "muster.toml").write_text(f"[engines.gpu]\nkind = 'slurm'\n{line}\n")
    done = checked("engines", "check", "gpu")

    assert done.returncode == 14
    assert why in done.stdout


def test_a_test_job_that_never_starts_is_cancelled(checked, tmp_path):
    commands = {
        "sbatch": "echo 7",
        "squeue": "echo 'squeue|7|PENDING|Resources|2026-11-22T10:00:00|'",
        "scancel": f'echo "$@" >{tmp_path}/cancelled',
    }
    put_commands(tmp_path / "bin", commands)
    done = checked("engines", "check", "slurm", "--timeout", "1s")

    assert done.returncode == 14
    assert "it had not started after 1 s (Resources): cancelled" in done.stdout
    assert "expected to start 2026-11-22T10:00:00" in done.stderr
    assert (tmp_path / "cancelled").read_text().split()[-1] == "7"


def test_the_secret_of_a_run_is_in_no_other_file(checked, tmp_path):
    check(checked)

    (folder,) = (tmp_path / "home/runs").iterdir()
    secret = (folder / "secret").read_bytes().strip()
    assert len(secret) >= 32
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "secret"]
    assert folder / "job.sh" in files
    assert not [path for path in files if secret in path.read_bytes()]
