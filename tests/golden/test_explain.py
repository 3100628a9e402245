"""Verdicts of `muster explain`, word for word: twelve incidents of tests/incidents, as the command prints them.

`pytest tests/golden --update-golden` writes them again; read the difference as a user would.
"""

from pathlib import Path

import pytest

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.own_run import render_verdict
from torchmuster.diagnose.logs import read_logs

INCIDENTS = Path(__file__).parents[1] / "incidents"
SHOWN = (
    "torchrun-started-on-one-of-two",
    "two-ids-info",
    "port-dropped",
    "gloo-docker-address",
    "value-error-on-second-node",
    "sigkill-one-of-four",
    "slurm-oom-kill",
    "missing-rank-watchdog",
    "watchdog-different-ops",
    "checkpoint-disk-full-write",
    "slingshot-efa-provider",
    "ok-slurm-long-progress",
)


@pytest.mark.parametrize("name", SHOWN)
def test_verdict_reads_as_it_did(name, golden, monkeypatch):
    monkeypatch.chdir(INCIDENTS)
    paths = (path for path in sorted(Path(name).rglob("*")) if path.is_file())
    files = [str(path) for path in paths if path.name != "expect.json"]
    golden("explain.txt", name, render_verdict(judge(Case(read_logs(files, year=2025)))))
