"""`muster engines` and `muster init`, with commands of a scheduler that answer from a file."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from kit.command import call
from torchmuster.errors import UsageError
from torchmuster.launcher.cli.engines import Queue, QueueList, engines, init, section
from torchmuster.launcher.cli.sites import my_sites
from torchmuster.launcher.engines.schedulers import SCHEDULERS
from torchmuster.launcher.spec.site import load_sites
from torchmuster.workflow.data.reference import datasets_url

SINFO = "main*|up|1-00:00:00|4|64|256000|gpu:a100:4\\nlong|down|infinite|1|64|2|(null)"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return a function that puts commands on an otherwise empty PATH: name, what it prints."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)

    def add(**commands):
        for name, text in commands.items():
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/sh\nprintf '{text}\\n'\n")
            path.chmod(0o755)

    return add


def slurm(add):
    add(sbatch="slurm 22.05.8", squeue="", scancel="", sinfo=SINFO)


def test_a_file_that_is_left_alone_is_said_once_by_a_command_that_looks_twice(here, capsys):
    Path("muster.toml").write_text("[engines.evil]\nkind = 'slurm'\n")
    Path("muster.toml").chmod(0o666)

    my_sites()
    my_sites()
    assert datasets_url()

    said = capsys.readouterr().err
    assert said.count("muster.toml is not used: everybody can write to it") == 1


def test_the_list_shows_what_was_found(here):
    slurm(here)
    Path("muster.toml").write_text("[engines.gpu]\nkind = 'slurm'\n[defaults]\non = 'gpu'\n")
    lines = [line.split() for line in call(engines).output.splitlines()]
    file = os.path.abspath("muster.toml")
    sbatch = os.environ["PATH"] + "/sbatch:"
    assert lines[:3] == [
        ["NAME", "KIND", "CONFIGURED", "HERE"],
        ["local", "local", "built", "in", "this", "machine"],
        ["slurm", "slurm", "built", "in", sbatch, "22.05.8"],
    ]
    assert lines[3] == ["pbs", "pbs", "built", "in", "no", "qsub", "on", "PATH"]
    assert lines[5] == ["gpu", "slurm", f"{file}:1:1", sbatch, "22.05.8"]
    assert ["without", "--on:", "gpu"] in lines


def test_the_list_as_json_and_inside_a_job(here, monkeypatch):
    monkeypatch.setenv("PBS_JOBID", "7.ctl")
    plain = json.loads(call(engines, "--json").output)
    assert plain["inside_job"] == {"kind": "pbs", "id": "7.ctl"}
    assert plain["default"] == "local"
    first = [(row["name"], row["found"]) for row in plain["engines"][:2]]
    assert first == [("local", True), ("slurm", False)]


@pytest.mark.parametrize(
    ("partition", "found", "code"),
    [
        ("main", "4 nodes of 64 CPUs", 0),
        ("man", "there is no `man`: did you mean `main`?", 14),
        ("long", "`long` takes no jobs now", 14),
    ],
)
def test_the_sites_partition_is_checked(here, partition, found, code):
    slurm(here)
    Path("muster.toml").write_text(f"[engines.gpu]\nkind = 'slurm'\npartition = '{partition}'\n")
    done = call(engines, "check", "gpu", "--no-job")
    assert found in done.output
    assert "nothing was submitted" in done.output
    assert done.return_value == code


def test_missing_commands_are_named(here):
    done = call(engines, "check", "pbs", "--json")
    plain = json.loads(done.output)
    assert done.return_value == 14
    found = {entry["check"]: entry["ok"] for entry in plain["checks"]}
    assert found == {"qsub": False, "qstat": False, "qdel": False, "to install": None}


def test_hosts_of_ssh_are_read(here):
    here(ssh="OpenSSH_9.2p1 Debian")
    Path("muster.toml").write_text("[engines.lab]\nkind = 'ssh'\nhostfile = 'hosts'\n")
    done = call(engines, "check", "lab", "--no-job")
    assert (done.return_value, "can't be read" in done.output) == (14, True)
    Path("hosts").write_text("n1 slots=4\nn2\n")
    assert "n1 (4 slots), n2 (? slots)" in call(engines, "check", "lab", "--no-job").output


def test_an_unknown_engine_has_a_near_miss(here):
    with pytest.raises(UsageError) as caught:
        call(engines, "check", "slrum")
    assert caught.value.fix == "did you mean `slurm`?"


def test_init_writes_what_it_finds(here, tmp_path):
    slurm(here)
    done = call(init)
    text = Path("muster.toml").read_text()
    assert done.stdout == text
    assert 'partition = "main"' in text
    assert "#   long: 1 nodes of 64 CPUs and 2 MB, at most infinite, takes no jobs now" in text
    assert "\nsetup" not in text
    site = load_sites(str(tmp_path / "work"), {"HOME": "/nonexistent"}, SCHEDULERS).get("slurm")
    assert (site.queue_name, site.account, site.setup) == ("main", None, ())


def test_init_tells_torque_from_pbs(here):
    here(qsub="Version: 6.1.2", qstat="batch 0 1 yes yes 0 0 0 0 0 0 E")
    text = call(init).stdout
    assert "# muster submits no jobs to Torque" in text
    assert tomllib.loads(text) == {"defaults": {}}


def test_init_where_nothing_is_found(here):
    text = call(init).stdout
    assert "no cluster was found" in text
    assert tomllib.loads(text) == {"defaults": {}}


def test_init_overwrites_nothing(here):
    Path("muster.toml").write_text("mine\n")
    with pytest.raises(UsageError, match="was not changed"):
        call(init)
    assert Path("muster.toml").read_text() == "mine\n"


def test_init_follows_no_link(here, tmp_path):
    Path("muster.toml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        call(init)
    assert not (tmp_path / "elsewhere").exists()


def test_odd_names_and_texts_stay_toml():
    queues = (Queue(name='a"b\\', about="two\nlines = 1"), Queue(name="x\x7f", is_open=False))
    text = section("pbs", QueueList(queues=queues, problem="it\nsaid = 'no'"))
    assert tomllib.loads(text)["engines"]["pbs"] == {"kind": "pbs", "queue": 'a"b\\'}


def test_a_choice_is_not_made_for_the_user():
    queues = (Queue(name="a"), Queue(name="b"))
    assert "queue" not in tomllib.loads(section("pbs", QueueList(queues=queues)))["engines"]["pbs"]
