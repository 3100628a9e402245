"""The toy engine of docs/writing-an-engine.md, as an installed package: found, checked, and run with."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from cluster.slurm import SCRIPT
from examples.example_runs import EXAMPLES
from kit.command import ran
from kit.installed import install_metadata
from kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
TOY = EXAMPLES / "toy_engine"
DOC = ROOT / "docs" / "writing-an-engine.md"


def install(folder):
    """Do what `pip install examples/toy_engine` does, without a network: metadata and commands."""
    project = install_metadata(TOY / "pyproject.toml", folder / "site")
    (folder / "bin").mkdir()
    for name, value in project["scripts"].items():
        module, _, function = value.partition(":")
        path = folder / "bin" / name
        path.write_text(
            f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        path.chmod(0o755)


@pytest.fixture
def toy(tmp_path):
    """Return a function that runs `muster` where the toy engine is installed."""
    install(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_", "MUSTER_"))}
    paths = [ROOT / "src", TOY, tmp_path / "site"]
    environment = {
        **clean,
        "PATH": f"{tmp_path / 'bin'}:{clean['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "MUSTER_HOME": str(tmp_path / "home"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "TOY_QUEUE": str(tmp_path / "queue"),
        "OMP_NUM_THREADS": "1",
    }

    def muster(*words, module="torchmuster", timeout_s=90):
        return ran(
            [sys.executable, "-m", module, *words], limit_s=timeout_s, cwd=tmp_path, env=environment
        )

    yield muster
    for path in (tmp_path / "queue").glob("*.json"):
        wait_until(lambda path=path: job_has_ended(path), "the end of a job")


def job_has_ended(path):
    return json.loads(path.read_text())["state"] in ("done", "failed", "cancelled", "late")


def test_an_installed_engine_is_listed(toy):
    rows = json.loads(toy("engines", "--json").stdout)["engines"]
    assert ["toy", "toy"] in [[row["name"], row["kind"]] for row in rows]


def test_it_passes_the_contract_of_all_engines(toy):
    suite = str(ROOT / "tests" / "engines")
    options = ("-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
    # A suite in itself, beside the other lanes of a machine of two cores.
    done = toy(suite, *options, "--dialect", "toy_engine.dialect", module="pytest", timeout_s=600)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^[3-9]\d passed", done.stdout, re.MULTILINE), done.stdout


def test_a_run_trains_on_two_nodes_of_it(toy, tmp_path):
    words = ("--nodes", "2", "--nproc-per-node", "1", "--run-id", "r", "--tee", "all")
    # The scheduler is asked once a second: a job that is over by then was never seen to run.
    (tmp_path / "train.py").write_text(f"{SCRIPT}\nimport time\ntime.sleep(5)\n")
    done = toy("run", "--on", "toy", *words, "train.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2") == 2
    assert "job 1 is running on toy1, toy2" in done.stderr


def test_what_it_says_of_one_node_does_not_reach_another(toy, tmp_path):
    words = ("--nodes", "2", "--nproc-per-node", "1", "--run-id", "r")
    done = toy("run", "--on", "toy", *words, "train.py")

    assert done.returncode == 0, done.stderr
    left = json.loads((tmp_path / "home/runs/r/environment.json").read_text())
    assert "TOY_QUEUE" in left
    assert not {"TOY_JOB_ID", "TOY_NODE", "TOY_NODES"} & left.keys()


def test_its_own_key_of_a_site_is_for_it_alone(toy, tmp_path):
    site = tmp_path / "muster.toml"
    site.write_text("[engines.toy]\npriority = 'low'\n")
    done = toy("run", "--on", "toy", "--dry-run", "train.py")
    assert done.returncode == 0, done.stderr
    assert "#TOY --priority=low\n" in done.stdout

    site.write_text("[engines.toy]\npriorty = 'low'\n")
    assert "did you mean `priority`" in toy("run", "--on", "toy", "--dry-run", "train.py").stderr
    site.write_text("[engines.slurm]\npriority = 'low'\n")
    assert "`priority`" in toy("run", "--on", "slurm", "--dry-run", "train.py").stderr


def test_a_run_inside_a_job_of_it_uses_the_nodes_of_the_job(toy, tmp_path):
    muster = f"{sys.executable} -m torchmuster"
    run = f"{muster} run --nproc-per-node 1 --run-id r --tee all train.py"
    lines = [
        "#!/bin/bash",
        "#TOY --nodes=2",
        f"#TOY --log={tmp_path}/log",
        f"{muster} engines",
        run,
    ]
    (tmp_path / "job.sh").write_text("\n".join(lines) + "\n")
    (tmp_path / "submit.py").write_text("from toy_engine.scheduler import submit\nsubmit()\n")

    assert toy("job.sh", module="submit").stdout == "toy job 1\n"
    job = tmp_path / "queue" / "1.json"
    wait_until(lambda: job_has_ended(job), "the end of the job", 60.0)

    log = (tmp_path / "log").read_text()
    assert json.loads(job.read_text())["state"] == "done", log
    assert "inside job 1 of toy\n" in log
    assert "muster: run r inside job 1 of toy, on toy1, toy2" in log
    assert log.count("sum 2") == 2


def test_a_failure_has_its_verdict(toy):
    words = ("--max-restarts", "0", "--run-id", "r")
    done = toy("run", "--on", "toy", *words, "train.py", "fail")

    assert done.returncode == 1
    assert "raised ValueError: no luck" in done.stderr


def test_its_refusals_are_explained(toy):
    done = toy("run", "--on", "toy", "--queue", "night", "train.py")

    assert done.returncode == 14
    assert "the toy scheduler knows no such queue" in done.stderr
    assert "no such queue: night" in done.stderr


def test_a_test_job_checks_it(toy):
    done = toy("engines", "check", "toy")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "ran on" in done.stdout
    assert re.search(r"toy_submit +ok", done.stdout)


def test_the_page_shows_the_example_as_it_is():
    page = DOC.read_text()
    for name in ("toy_engine/dialect.py", "pyproject.toml"):
        code = (TOY / name).read_text().rstrip("\n")
        assert f"\n{code}\n```" in page, f"copy examples/toy_engine/{name} into {DOC.name}"


def test_the_dialect_is_as_short_as_the_page_says():
    assert len((TOY / "toy_engine/dialect.py").read_text().splitlines()) <= 170
