"""What can be started where: the tables of docs/where.md, each cell decided in process.

A cell is `yes`, or the number of a sentence below the tables: what the command says when it refuses. `--update-golden` writes
the page again; read the difference as a user would.
"""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
from click.testing import CliRunner

from kit.sessions import session_setup
from kit.values import run_plan
from torchmuster.core import plugs
from torchmuster.core.cli.main import muster
from torchmuster.core.files.atomic import write_json
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.plan import StartMethod
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.create import failed_before_start
from torchmuster.core.spec.launch import RunRequest, read_job_limits
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import ManyErrors, MusterError
from torchmuster.launcher.api.launch import launch_by
from torchmuster.launcher.cli.sites import my_sites
from torchmuster.launcher.engines.allocation import OwnJob
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs.jobs import make_job
from torchmuster.launcher.model.job import AllocatedNode, Allocation
from torchmuster.multirun.sweep.arrays import SweepArrays
from torchmuster.workflow.record import State, WorkflowResult

PAGE = Path(__file__).parents[2] / "docs" / "where.md"
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
JOBS = {"scheduler": "slurm", "cluster": "kubernetes"}  # places whose runs are jobs
ENGINES = {**EARLIER, "in a job": "gpu"}  # of `engines check`
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
    "`muster run`": "run {where} train.py",
    "`muster run --dry-run`": "run {where} --dry-run train.py",
    "`muster run --detach`": "run {where} --detach train.py",
    "`torchmuster.launch`": "",
    "`muster torchrun`": "torchrun --standalone train.py",
    "`muster submit`": "submit {where} w.yaml",
    "`muster submit --dry-run`": "submit {where} --dry-run w.yaml",
    "`muster submit --detach`": "submit {where} --detach w.yaml",
    "`muster sweep`": "sweep {where} --grid x=1,2 train.py",
    "`muster sweep --dry-run`": "sweep {where} --grid x=1,2 --dry-run train.py",
    "`muster sweep --detach`": "sweep {where} --grid x=1,2 --detach train.py",
    "`muster session start`": "session start {where}",
    "`muster dev`": "dev {where} train.py",
    "`muster doctor`": "doctor {where} --nodes 1",
    "`muster engines check`": "engines check --no-job {engine}",
    "`muster restart`": "restart {earlier}",
    "`muster restart --detach`": "restart --detach {earlier}",
    "`muster restart` of a workflow": "restart {earlier}-w",
    "`muster restart --detach` of a workflow": "restart --detach {earlier}-w",
    "`muster restart` of a sweep": "restart {earlier}-s",
    "`muster restart --detach` of a sweep": "restart --detach {earlier}-s",
}

# What is called when all is decided.
STARTS = (
    "torchmuster.core.cli.place.begin",
    "torchmuster.core.owner.create.create_run_dir",
    "torchmuster.multirun.cli.dev._Session.open",
    "torchmuster.launcher.cli.torchrun._bind_if_head",
    "torchmuster.multirun.cli.sweep.start_sweep",
    "torchmuster.launcher.jobs.jobs.submit_script",
    "torchmuster.multirun.sweep.arrays.submit_script",
    "torchmuster.kubernetes.pods.members.submit_script",
)


# They make the folder of what is started.
MAKES = (
    "torchmuster.workflow.owner.workflow.create_workflow_dir",
    "torchmuster.multirun.sweep.members.create_sweep_dir",
)


class StartsError(Exception):
    """All was decided, and something would be made now."""


def replace_everywhere(monkeypatch, name, value):
    """Replace a function also in the modules that have imported its name, whichever tests ran before."""
    for point in ("commands", "cells"):
        for what in plugs.table(point).values():
            plugs.load(what[-1] if isinstance(what, tuple) else what)
    original = resolve_name(name)
    monkeypatch.setattr(name, value)
    attribute = name.rpartition(".")[2]
    for module in [one for key, one in sys.modules.items() if key.startswith("torchmuster.")]:
        if vars(module).get(attribute) is original:
            monkeypatch.setattr(module, attribute, value)


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

    def made(make):
        def make_and_stop(*given):
            make(*given)
            raise StartsError

        return make_and_stop

    monkeypatch.setattr("torchmuster.launcher.engines.schedulers.guard", lambda *given: None)
    nodes = tuple(AllocatedNode(name=name) for name in (os.uname().nodename, "n2"))
    job = OwnJob(dialect=load_dialect("slurm"), allocation=Allocation(job_id="7", nodes=nodes))
    is_inside = [False]
    monkeypatch.setattr(
        "torchmuster.launcher.cli.places.find_allocation",
        lambda: job if is_inside[0] else None,
    )
    hold(tmp_path, monkeypatch)
    with monkeypatch.context() as making:
        for name in MAKES:
            replace_everywhere(making, name, made(resolve_name(name)))
        make_earlier_sets(is_inside)
    for name in (*STARTS, *MAKES):
        replace_everywhere(monkeypatch, name, started)
    return is_inside


PLAN = run_plan(run_id="s", target="train.py", start=StartMethod.FRESH)


def hold(folder, monkeypatch):
    """Pretend that the session `main` lives on this machine."""
    setup = session_setup()
    held = type("Held", (), {"run_dir": RunDir(str(folder / "session"))})()
    sessions = "torchmuster.multirun.views.sessions"
    replace_everywhere(monkeypatch, f"{sessions}.find_session", lambda name: held)
    replace_everywhere(monkeypatch, f"{sessions}.plan_of", lambda run_dir: PLAN)
    reading = "torchmuster.multirun.server.call.read_setup"
    replace_everywhere(monkeypatch, reading, lambda run_dir: setup)


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
        if place in JOBS:
            limits = read_job_limits(RunRequest(script="train.py"), Problems())
            site = my_sites().get(engine)
            job = make_job(plan, run_dir, site, RunRequest(script="train.py"), limits)
            brings = (("code.parcel", "/x"),) if place == "cluster" else ()
            noted = {"engine": site.kind, "request": codec.to_plain(replace(job, brings=brings))}
            write_json(run_dir.job, noted)


def make_earlier_sets(is_inside):
    """Make the record of a workflow and of a sweep in each place, which got no further than their folders."""
    limits = read_job_limits(RunRequest(script="train.py"), Problems())
    for place, engine in EARLIER.items():
        is_inside[0] = place == "in a job"
        for letter, words in (("w", "submit {} w.yaml"), ("s", "sweep {} --grid x=1,2 train.py")):
            name = f"old-{place.replace(' ', '-')}-{letter}"
            where = f"{PLACES[place]} --run-id {name}"
            if (place, letter) == ("session", "w"):
                continue
            assert outcome(shlex.split(words.format(where))) is None
            run_dir = RunDir(os.path.join(os.environ["MUSTER_HOME"], "runs", name))
            if place in JOBS and letter == "s":
                run = replace(PLAN, run_id=name)
                asked = make_job(
                    run, run_dir, my_sites().get(engine), RunRequest(script="x"), limits
                )
                noted = SweepArrays(engine=JOBS[place], request=asked)
                write_json(run_dir.arrays, codec.to_plain(noted))
            elif place == "scheduler":
                write_json(run_dir.jobs, {"engine": "slurm", "site": engine, "jobs": {"t": "1"}})
            elif place in ("hosts", "cluster"):
                write_json(run_dir.site, {"site": engine})


def decide(row, place, is_inside):
    """Return the words of the refusal of a cell; None where it starts."""
    is_inside[0] = place == "in a job"
    if not ROWS[row]:
        return outcome_of_launch(PLACES[place])
    line = ROWS[row].format(
        where=PLACES[place], engine=ENGINES[place], earlier=f"old-{place.replace(' ', '-')}"
    )
    if (words := lacks_a_place(line, place)) is not None:
        return words
    if line.startswith("restart"):
        end(line.split()[-1])
    return outcome(shlex.split(line))


def end(name):
    """Let what has been made by that name have failed, again if a cell before has begun it anew."""
    run_dir = RunDir(os.path.join(os.environ["MUSTER_HOME"], "runs", name))
    failed = failed_before_start(run_dir, 1, Report(error="it failed"))
    if name.endswith("-w"):
        failed = WorkflowResult(run_id=name, state=State.FAILED, exit_code=1, elapsed_s=1.0)
    write_json(run_dir.result, codec.to_plain(failed))
    if os.path.exists(run_dir.owner):
        os.unlink(run_dir.owner)


def lacks_a_place(line, place):
    """Return why a command can't be told the place; None where it can, or finds it by itself."""
    if line.startswith("torchrun") and PLACES[place] not in ("--here", ""):
        return "it starts the workers of the machine on which it is typed, as torchrun does (muster run --on NAME)"
    if place == "session" and line.startswith(("submit", "session start", "doctor")):
        return "the command has no `--session`: a session holds nodes for runs and sweeps (muster run --session NAME)"
    if place == "session" and line.startswith("engines check"):
        return "it looks at engines (muster session shows the sessions)"
    if place == "session" and line.endswith("-w"):
        return "no workflow runs in a session (muster restart goes to the place of its start)"
    return None


def outcome_of_launch(where):
    """Return what `torchmuster.launch` gets from the command that it starts: in this process, for once."""
    name, _, value = where.removeprefix("--").partition(" ")
    options = {name: value or True} if where else {}
    said = []

    def begin(words, stdout, stderr):
        said.append(outcome(words))
        raise StartsError

    with pytest.raises(StartsError):
        launch_by(begin, "train.py", (), options)
    return said[0]


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
        lines.append(f"| {row} | {' | '.join(cells)} |")
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
