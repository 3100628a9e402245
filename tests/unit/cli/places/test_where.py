"""What can be started where: the tables of docs/where.md, each cell decided in process.

A cell is `yes`, or the number of a sentence below the tables: what the command says when it refuses. `--update-golden` writes
the page again; read the difference as a user would.
"""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from torchmuster.cli.main import muster
from torchmuster.cli.sites import my_sites
from torchmuster.engines.own_job import OwnJob
from torchmuster.engines.registry import load_dialect
from torchmuster.errors import ManyErrors, MusterError
from torchmuster.files.atomic import write_json
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.job import AllocatedNode, Allocation
from torchmuster.model.plan import Program, RunPlan, ScriptKind, StartMethod
from torchmuster.model.verdict import Report
from torchmuster.node.door.messages import SessionSetup
from torchmuster.owner.jobs.jobs import failed_before_start, make_job
from torchmuster.spec.launch import RunRequest, read_job_limits
from torchmuster.spec.problems import Problems

PAGE = Path(__file__).parents[4] / "docs" / "where.md"
PLACES = {
    "here": "--here",
    "in a job": "",
    "hosts": "--on lab",
    "scheduler": "--on gpu",
    "cluster": "--on kube",
    "session": "--session main",
}
EARLIER = {
    "here": "local",
    "in a job": "slurm",
    "hosts": "lab",
    "scheduler": "gpu",
    "cluster": "kube",
    "session": "local",
}
NO_OPTION = "the command has no `--session`: a session holds nodes for runs and sweeps (muster run --session NAME)"
BEGIN, END = "<!-- cells -->\n", "<!-- end of cells -->"
SITES = """\
[engines.lab]
kind = "ssh"
hosts = ["a", "b"]

[engines.gpu]
kind = "slurm"

[engines.kube]
kind = "kubernetes"
image = "example.com/team/train:7"
"""
WORKFLOW = """\
workflow:
  name: w
  tasks:
  - name: t
    image: busybox
    command: ["true"]
"""
# A row: what is typed, with `{where}` for the words of the place.
ROWS = {
    "run": "run {where} train.py",
    "run --dry-run": "run {where} --dry-run train.py",
    "run --detach": "run {where} --detach train.py",
    "submit": "submit {where} w.yaml",
    "submit --dry-run": "submit {where} --dry-run w.yaml",
    "submit --detach": "submit {where} --detach w.yaml",
    "sweep": "sweep {where} --grid x=1,2 train.py",
    "sweep --dry-run": "sweep {where} --grid x=1,2 --dry-run train.py",
    "sweep --detach": "sweep {where} --grid x=1,2 --detach train.py",
    "session start": "session start {where}",
    "dev": "dev {where} train.py",
    "doctor": "doctor {where} --nodes 1",
    "restart": "restart {earlier}",
    "restart --detach": "restart --detach {earlier}",
}
SESSIONLESS = ("submit", "session start", "doctor")  # their commands have no --session


# What is called when all is decided.
STARTS = (
    "torchmuster.cli.places.place.begin",
    "torchmuster.owner.create.create_run_dir",
    "torchmuster.owner.create.create_workflow_dir",
    "torchmuster.owner.create.create_sweep_dir",
    "torchmuster.cli.runs.dev._Session.open",
)


class StartsError(Exception):
    """All was decided, and something would be made now."""


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with a script, a workflow and sites; a session that lives; a job that this shell may be in."""
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "w.yaml").write_text(WORKFLOW)
    (tmp_path / "muster.toml").write_text(SITES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [n for n in os.environ if n.startswith(("SLURM_", "PBS_")) or n == "MUSTER_ON"]:
        monkeypatch.delenv(name)

    make_earlier(tmp_path)
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text("#!/bin/sh\necho '{\"items\": []}'\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(kubectl.parent), prepend=os.pathsep)

    def started(*given, **named):
        raise StartsError

    for name in STARTS:
        monkeypatch.setattr(name, started)
    monkeypatch.setattr("torchmuster.engines.schedulers.guard", lambda *given: None)
    nodes = tuple(AllocatedNode(name=name) for name in (os.uname().nodename, "n2"))
    job = OwnJob(dialect=load_dialect("slurm"), allocation=Allocation(job_id="7", nodes=nodes))
    is_inside = [False]
    monkeypatch.setattr(
        "torchmuster.cli.runs.job.find_allocation", lambda: job if is_inside[0] else None
    )
    hold(tmp_path, monkeypatch)
    return is_inside


PLAN = RunPlan(
    run_id="s",
    program=Program(
        kind=ScriptKind.FILE,
        target="train.py",
        args=(),
        python=("python3",),
        cwd="/",
        start=StartMethod.FRESH,
    ),
    min_nodes=1,
    max_nodes=1,
    workers_per_node=(1,),
)


def hold(folder, monkeypatch):
    """Pretend that the session `main` lives on this machine."""
    setup = SessionSetup(
        name="main",
        nodes=1,
        workers=None,
        python=("python3",),
        preload=(),
        idle_s=None,
        limit_s=None,
        folder="/",
        variables=(),
    )
    held = type("Held", (), {"run_dir": RunDir(str(folder / "session"))})()
    sessions = "torchmuster.owner.views.sessions"
    monkeypatch.setattr(f"{sessions}.find_session", lambda name: held)
    monkeypatch.setattr(f"{sessions}.plan_of", lambda run_dir: PLAN)
    monkeypatch.setattr("torchmuster.node.door.call.read_setup", lambda run_dir: setup)


def outcome(words):
    """Return None where a command starts or shows it, else what it refuses with."""
    typed, sys.argv = sys.argv, ["muster", *words]  # some hints repeat it
    try:
        done = CliRunner().invoke(muster, words, standalone_mode=False)
    finally:
        sys.argv = typed
    error = done.exception
    if isinstance(error, StartsError) or (error is None and not done.exit_code):
        return None
    if isinstance(error, ManyErrors):
        error = error.errors[0]
    if isinstance(error, MusterError):
        return f"{error.what}{f' ({error.fix})' if error.fix else ''}"
    return f"{type(error).__name__}: {error}"


def make_earlier(folder):
    """Make the record of a run that has failed in each place."""
    for place, engine in EARLIER.items():
        run_dir = RunDir(str(folder / "home" / "runs" / f"old-{place.replace(' ', '-')}"))
        os.makedirs(run_dir.path)
        job_id = "6" if place == "in a job" else None
        session = "main" if place == "session" else None
        plan = replace(PLAN, run_id=os.path.basename(run_dir.path), engine=engine, job_id=job_id)
        plan = replace(plan, session=session)
        write_json(run_dir.plan, codec.to_plain(plan))
        failed = failed_before_start(run_dir, 1, Report(error="it failed"))
        write_json(run_dir.result, codec.to_plain(failed))
        if place in ("scheduler", "cluster"):
            limits = read_job_limits(RunRequest(script="train.py"), Problems())
            site = my_sites().get(engine)
            job = make_job(plan, run_dir, site, RunRequest(script="train.py"), limits)
            brings = (("code.parcel", "/x"),) if place == "cluster" else ()
            noted = {"engine": site.kind, "request": codec.to_plain(replace(job, brings=brings))}
            write_json(run_dir.job, noted)


def decide(row, place, is_inside):
    """Return the words of the refusal of a cell; None where it starts."""
    if place == "session" and row.split(" --")[0] in SESSIONLESS:
        return NO_OPTION
    is_inside[0] = place == "in a job"
    line = ROWS[row].format(where=PLACES[place], earlier=f"old-{place.replace(' ', '-')}")
    return outcome(shlex.split(line))


def render(world):
    """Return the tables and the sentences below them."""
    sentences, lines = [], []
    lines.append(f"| | {' | '.join(PLACES)} |")
    lines.append(f"|---|{'---|' * len(PLACES)}")
    for row in ROWS:
        cells = []
        for place in PLACES:
            said = decide(row, place, world)
            if said is not None and said not in sentences:
                sentences.append(said)
            cells.append("yes" if said is None else f"no: {sentences.index(said) + 1}")
        lines.append(f"| `muster {row}` | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. {said}" for number, said in enumerate(sentences, 1)]
    return "\n".join(lines) + "\n"


def test_every_cell_starts_or_says_what_to_do(world, request):
    shown = render(world)
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text[:begin] + shown + text[end:])
        return
    assert shown == text[begin:end]
    assert "Error:" not in shown  # an exception that is no answer to a user
