"""`muster engines check` with a test job, on the pretended clusters."""

import json
import os
import sys

import pytest

from cluster.test_fake_slurm import cluster, muster

__all__ = ["cluster"]


@pytest.fixture
def site(cluster, tmp_path):
    """Return the environment of a login node whose sinfo answers too."""
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("sinfo", "echo 'main*|up|1:00:00|2|2|1000|(null)'"),
        ("sacctmgr", "exit 1"),
    ):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return {**cluster, "PATH": f"{tmp_path}/bin:{cluster['PATH']}"}


def check(site, folder, *words):
    done = muster(site, folder, "engines", "check", "slurm", "--json", *words)
    rows = {row["check"]: row for row in json.loads(done.stdout)["checks"]}
    return done, rows


def test_the_test_job_tells_what_its_node_has(site, tmp_path):
    done, rows = check(site, tmp_path)

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


def test_without_a_job_nothing_is_submitted(site, tmp_path):
    done, rows = check(site, tmp_path, "--no-job")

    assert done.returncode == 0, done.stderr
    assert "test job" not in rows
    assert not list((tmp_path / "queue").glob("*.json"))


def test_a_refused_test_job_says_why(site, tmp_path):
    (tmp_path / "muster.toml").write_text(
        "[engines.gpu]\nkind = 'slurm'\ndirectives = ['--partition=nope']\n"
    )
    done = muster(site, tmp_path, "engines", "check", "gpu")

    assert done.returncode == 14
    assert "Slurm knows no such partition" in done.stdout


def test_a_test_job_that_can_not_work_shows_why(site, tmp_path):
    (tmp_path / "muster.toml").write_text(
        "[engines.gpu]\nkind = 'slurm'\nsetup = ['echo no such module >&2; exit 3']\n"
    )
    done = muster(site, tmp_path, "engines", "check", "gpu")

    assert done.returncode == 14
    assert "no such module" in done.stdout


def test_a_test_job_that_never_starts_is_cancelled(site, tmp_path):
    commands = {
        "sbatch": "echo 7",
        "squeue": "echo 'squeue|7|PENDING|Resources|2026-11-22T10:00:00|'",
        "scancel": f'echo "$@" >{tmp_path}/cancelled',
    }
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    done = muster(site, tmp_path, "engines", "check", "slurm", "--timeout", "1s")

    assert done.returncode == 14
    assert "it had not started after 1 s (Resources): cancelled" in done.stdout
    assert "expected to start 2026-11-22T10:00:00" in done.stderr
    assert (tmp_path / "cancelled").read_text().split()[-1] == "7"


def test_the_secret_of_a_run_is_in_no_other_file(site, tmp_path):
    check(site, tmp_path)

    (folder,) = (tmp_path / "home/runs").iterdir()
    secret = (folder / "secret").read_bytes().strip()
    assert len(secret) >= 32
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "secret"]
    assert folder / "job.sh" in files
    assert not [path for path in files if secret in path.read_bytes()]
