"""`--ship-env` on a real Slurm: the environment is unpacked into each node's scratch, once for each content."""

import subprocess
import sys

import pytest

SCRIPT = """\
import os, sys, here_alone
print("rank", os.environ["RANK"], here_alone.WORD, "in", sys.prefix, os.environ["VIRTUAL_ENV"] == sys.prefix, flush=True)
"""
WORDS = ("--nodes", "2", "--nproc-per-node", "1", "--tee", "all", "train.py")


@pytest.fixture
def environment(login):
    """Make one with a package that no other has."""
    prefix = login.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    (site,) = prefix.glob("lib/python3*/site-packages")
    (site / "here_alone.py").write_text("WORD = 'shipped'\n")
    login.script(SCRIPT)
    (login.folder / "scratch").mkdir()
    # Of a node its own, in a folder that the test sees.
    (login.folder / "muster.toml").write_text(
        f"""[engines.slurm]\nkind = "slurm"\nscratch = "{login.folder}/scratch/$SLURMD_NODENAME"\n"""
        f"""setup = ["mkdir -p {login.folder}/scratch/$SLURMD_NODENAME"]\n"""
    )
    return prefix


def places(login):
    return sorted(
        str(p.parent.relative_to(login.folder / "scratch"))
        for p in login.folder.glob("scratch/*/muster-environments-*/*/env")
    )


def test_a_job_unpacks_it_on_each_node_once_and_runs_in_it(login, environment):
    words = ("run", "--on", "slurm", f"--ship-env={environment}", *WORDS)
    done = login(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shipped in") == 2
    assert f"{login.folder}/scratch/n" in done.stdout
    assert done.stdout.count(" True") == 2
    found = places(login)
    assert len(found) == 2
    assert len({place.split("/")[0] for place in found}) == 2
    inodes = [(login.folder / "scratch" / place).stat().st_ino for place in found]

    done = login(*words)
    assert done.returncode == 0, done.stderr
    assert places(login) == found
    assert [(login.folder / "scratch" / place).stat().st_ino for place in found] == inodes


def test_a_node_that_can_t_have_it_ends_the_run_with_the_reason(login, environment):
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "library.so").write_bytes(b"\x7fELF..GLIBC_2.999\0")
    done = login("run", "--on", "slurm", f"--ship-env={environment}", *WORDS)
    assert done.returncode != 0
    assert "needs a newer C library" in done.stderr
    assert "glibc 2.999" in done.stderr
    assert places(login) == []
