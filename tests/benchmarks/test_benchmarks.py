"""Each benchmark measures: its quick form gives a table in which nothing was lost. No time is judged here.

They run as on a cluster's login node, inside a job: none of it may reach what is measured.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from kit.command import ran
from kit.namespaces import why_no_networks
from kit.world import HIDDEN
from lab.netlab import why_not

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT_S = 300.0
QUICK = {
    "launch": "--only start,restart,help --side muster",
    "rendezvous": "",
    "train": "--only stall,memory",
    "goodput": "",
    "losses": "--only spare,head",
    "workflows": "",
    "sweeps": "",
    "engines": "--only pbs",
    "pods": "--only together",
    "doctor": "--only many,short",
    "explain": "",
    "report": "",
    "scale": "",
    "executed": "",
    "eyes": "",
    "python": "",
    "sessions": "",
    "ship_env": "",
}
LONG = ("goodput", "scale", "sessions", "ship_env", "train")
NEEDS_LAB = {"ship_env": why_not(), "pods": why_no_networks()}


@pytest.fixture
def login_node(tmp_path):
    """Return the environment of a shell in a job, with schedulers that do harm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in sorted(HIDDEN):
        (folder / name).write_text("#!/bin/sh\necho the real thing was called >&2\nexit 97\n")
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_CONF": "/nonexistent",
        "PBS_JOBID": "1",
        "MUSTER_ON": "slurm",
        "MUSTER_HOME": "/nonexistent/home",
        "RANK": "7",
        "PYTHONPATH": str(BENCHMARKS.parent / "src"),
    }


def run(name, words, environment, tmp_path):
    argv = [sys.executable, BENCHMARKS / f"{name}.py", *words, "--json", tmp_path / f"{name}.json"]
    return ran(argv, limit_s=LIMIT_S, env=environment, cwd=tmp_path)


@pytest.mark.timeout(400)  # seconds on an idle machine, minutes on a busy one
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.lab) if name in LONG else name for name in QUICK],
)
def test_the_quick_form_measures_and_loses_nothing(name, login_node, tmp_path):
    if NEEDS_LAB.get(name):
        pytest.skip(f"no network can be made here: {NEEDS_LAB[name]}")
    done = run(name, ["--quick", *QUICK[name].split()], login_node, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the real thing was called" not in done.stderr
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert {"commit", "date"} <= set(found["machine"])
    assert "lost" not in done.stdout, done.stdout + done.stderr
    measured = found.get("times") or found
    rows = measured.get("rows") or measured.get("samples") or measured.get("cases")
    assert rows
    table = (tmp_path / f"{name}.md").read_text()
    assert table == done.stdout
    assert f"commit {found['machine']['commit']}, date {found['machine']['date']}" in table


def test_every_benchmark_has_a_quick_form_that_is_tested():
    scripts = {p.stem for p in BENCHMARKS.glob("*.py")}
    assert scripts == set(QUICK)


def test_a_benchmark_beyond_its_limit_ends_and_says_what_it_waited_for(login_node, tmp_path):
    words = ["--quick", "--limit", "0.2"]
    done = run("workflows", words, login_node, tmp_path)
    assert done.returncode == 1
    assert "workflows: not done within 0.2 s; it waited for: round 1 of 1: plan" in done.stderr


MUTE = """
import sys
import rendezvous
from meeting import agents

class Mute(agents.AgentWithoutWorkers):
    def __init__(self, *given):
        super().__init__(*given)
        self.spawners.announce = lambda: None
        self.parts[0].take = lambda message: True

agents.AgentWithoutWorkers = Mute
rendezvous.ONE_LIMIT_S = 2.0
rendezvous.processes.adopt_orphans()
case = rendezvous.make_cases({"real": (2,), "torchrun": (), "light": (), "killed": ()}, [])[0]
print(rendezvous.take(case).lost)
"""


def test_a_rendezvous_that_does_not_come_about_says_what_was_missing(login_node, tmp_path):
    environment = {**login_node, "PYTHONPATH": f"{BENCHMARKS}:{login_node['PYTHONPATH']}"}
    done = ran([sys.executable, "-c", MUTE], limit_s=LIMIT_S, env=environment)
    assert done.stdout.startswith(
        "2 agents have joined, 0 are missing, 0 are ready to start workers; last events:"
    ), done.stderr


def test_a_lost_job_is_told_with_the_line_that_says_why():
    code = (
        "from launching.job import lost_with\n"
        "said = 'muster: run 1\\nerror: this looks like a login node\\nhint: --here\\n'\n"
        "print(lost_with('muster: exit code 2', said))"
    )
    done = ran([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(BENCHMARKS)})
    assert done.stdout == "muster: exit code 2: error: this looks like a login node\n"
