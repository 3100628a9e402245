"""Nothing of the machine's schedulers, launchers, settings and jobs reaches a test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit import world

TESTS = Path(__file__).parents[1]
CALLED = "the real thing was called"
# One each of what such a machine broke: a run, a refusal in golden words, a login shell, torch's process group.
REPRESENTATIVES = [
    "tests/start/test_choice.py::test_fork_and_fresh_are_obeyed_without_a_word",
    "tests/golden/test_bad_input.py::test_a_full_disk_is_an_error_before_anything_starts",
    "tests/unit/launcher/node/test_shell.py::test_a_failing_command_is_named_with_node_code_and_output",
    "tests/unit/train/test_evaluation.py::test_each_evaluation_begins_anew",
]


def command(path, text=f"#!/bin/sh\necho {CALLED} >&2\nexit 97\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def evil(tmp_path):
    """Return the environment of a shell in a job of a cluster, with commands and settings that do harm."""
    for name in sorted(world.HIDDEN):
        command(tmp_path / "bin" / name)
    config = tmp_path / "home" / ".config" / "muster" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[engines.evil")
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "evil[1-2]"}
    job |= {"SLURM_PROCID": "3", "PBS_JOBID": "9.evil", "OMPI_COMM_WORLD_RANK": "1", "RANK": "1"}
    settings = {"SLURM_CONF": "/nonexistent", "PBS_CONF_FILE": "/nonexistent", "MUSTER_ON": "evil"}
    settings |= {"MUSTER_HOME": "/nonexistent/muster", "GLOO_SOCKET_IFNAME": "evil0"}
    settings |= {"XDG_CONFIG_HOME": str(config.parents[1]), "HOME": str(tmp_path / "home")}
    path = {"PATH": f"{tmp_path / 'bin'}:{world.MACHINE_PATH}"}
    return {**world.MACHINE, **job, **settings, **path}


def test_commands_of_schedulers_are_hidden_and_all_others_of_the_folder_stay(tmp_path):
    for name in ("srun", "mpiexec", "git"):
        command(tmp_path / "usr" / name)
    path = world.own_path(f"{tmp_path / 'usr'}:/nonexistent:{tmp_path}", tmp_path / "own")
    stand_in, missing, other = path.split(":")
    assert (missing, other) == ("/nonexistent", str(tmp_path))
    assert os.listdir(stand_in) == ["git"]


def test_a_virtual_environment_with_an_mpi_keeps_its_python(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    command(tmp_path / "venv" / "bin" / "mpirun")
    path = world.own_path(str(tmp_path / "venv" / "bin"), tmp_path / "own")
    argv = [f"{path}/python", "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "venv")
    assert not Path(path, "mpirun").exists()


def test_variables_of_jobs_and_settings_are_gone_and_what_asks_for_more_tests_stays(tmp_path, evil):
    evil |= {"MUSTER_LAB": "1", "LANG": "C.UTF-8"}
    found = world.own_environment(evil, tmp_path)
    foreign = ("SLURM", "PBS_", "OMPI_", "RANK", "GLOO_", "XDG_", "MUSTER_HOME")
    assert not [name for name in found if name.startswith(foreign)]
    assert (found["MUSTER_LAB"], found["LANG"], found["MUSTER_ON"]) == ("1", "C.UTF-8", "local")
    assert found["HOME"] == str(tmp_path / "user")


@pytest.mark.slow
def test_on_a_login_node_inside_a_job_the_tests_pass_and_call_nothing_real(evil):
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *REPRESENTATIVES]
    done = subprocess.run(argv, cwd=TESTS.parent, env=evil, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert CALLED not in done.stdout + done.stderr
