"""`muster run --dry-run`: the exact scripts and commands of every engine, and no secret in them."""

import os
import re
import sys
from pathlib import Path

import pytest

import torchmuster
from kit.command import call
from torchmuster.core.cli.run import run
from torchmuster.errors import UsageError

SITES = """\
[engines.gpu]
kind = "slurm"
partition = "gpu"
account = "proj123"
time = "2h"
directives = ["--reservation=course"]
setup = ["module load cuda/12.6"]
environment = { OMP_NUM_THREADS = 8 }

[engines.olivia]
kind = "pbs"
queue = "workq"
project = "proj"
chunk = { sales_op = "blanca" }
setup = ["module load cray-python"]

[engines.lab]
kind = "ssh"
hosts = ["n1", "n2"]
"""
SECRETS = {
    "WANDB_API_KEY": "sentinel-wandb",
    "AWS_SECRET_ACCESS_KEY": "sentinel-aws",
    "HF_TOKEN": "sentinel-hf",
    "MASTER_PASSWORD": "sentinel-password",
}


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "muster.toml").write_text(SITES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PBS_")):
            monkeypatch.delenv(name)

    def dry_run(*words):
        line = ["--run-id", "r1", "--nodes", "2", "--dry-run", *words, "train.py", "--lr", "a b"]
        return call(run, *line)

    return dry_run


def plain(text, folder):
    """Return a text without what is this machine's."""
    text = text.replace(str(Path(torchmuster.__file__).parent), "/opt/torchmuster")
    text = text.replace(str(folder), "/home/me").replace(sys.executable, "/usr/bin/python3")
    return text.replace(f"--submitted-from={os.uname().machine}", "--submitted-from=x86_64")


def test_all_engines_and_sites_are_shown(dry_run):
    done = dry_run("--on", "all")
    heads = re.findall(r"^# ======== (.*)$", done.stdout, re.MULTILINE)
    assert heads == [
        "local",
        "slurm",
        "pbs",
        "gpu (slurm)",
        "olivia (pbs)",
        "lab (ssh)",
    ]
    assert done.return_value == 0
    assert "not possible" not in done.stdout


@pytest.mark.parametrize("name", ["local", "slurm", "pbs", "gpu", "olivia"])
def test_whole_script_of_a_run(dry_run, tmp_path, golden, name):
    where = ("--here",) if name == "local" else ("--on", name)
    golden("scripts/run.txt", name, plain(dry_run(*where).stdout, tmp_path))


@pytest.mark.parametrize(("words", "warn"), [((), "300"), (("--warn", "1m"), "60")])
def test_the_sites_warning_holds_unless_the_command_line_has_another(
    dry_run, tmp_path, words, warn
):
    with (tmp_path / "muster.toml").open("a") as file:
        file.write('[engines.long]\nkind = "slurm"\nwarn = "5m"\n')
    assert f" --warn={warn} " in dry_run("--on", "long", *words).stdout


def test_the_hosts_of_ssh_get_a_command_each(dry_run):
    commands = [line for line in dry_run("--on", "lab").stdout.splitlines() if line[:2] == "$ "]
    assert len(commands) == 2


def test_nothing_is_made(dry_run, tmp_path):
    dry_run("--on", "all")
    assert not (tmp_path / "home" / "runs").exists()


def test_no_value_of_a_secret_is_in_what_is_shown(dry_run, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    shown = dry_run("--on", "all").output
    assert not [value for value in SECRETS.values() if value in shown]


def test_an_engine_that_can_not_take_the_run_is_no_end_for_the_others(dry_run):
    done = dry_run("--on", "all", "--nodes", "3")
    assert "# not possible: 3 nodes are asked for, there are 2 hosts" in done.stdout
    assert "#SBATCH --nodes=3" in done.stdout
    assert done.return_value == 2


def test_all_is_for_looking_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="works with --dry-run only"):
        run.main(["--on", "all", "train.py"], standalone_mode=False)


@pytest.mark.parametrize(
    ("engine", "more", "asked"),
    [
        ("pbs", (), "#PBS -l select=2:ncpus=4:mpiprocs=1"),
        ("pbs", ("--cpus-per-node", "9"), "#PBS -l select=2:ncpus=9:mpiprocs=1"),
        ("slurm", (), "#SBATCH --cpus-per-task=4"),
        ("slurm", ("--cpus-per-node", "9"), "#SBATCH --cpus-per-task=9"),
    ],
)
def test_a_node_has_a_cpu_for_each_worker_where_none_are_asked_for(dry_run, engine, more, asked):
    done = dry_run("--on", engine, "--nproc-per-node", "4", *more)
    assert asked in done.stdout.splitlines()


def test_slurm_gives_the_cpus_of_gpus_by_itself(dry_run):
    done = dry_run("--on", "slurm", "--nproc-per-node", "4", "--gpus-per-node", "4")
    assert "--cpus-per-task" not in done.stdout
