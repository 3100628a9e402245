"""A run that goes on in another job asks for what the first one did, for its own directory."""

import pytest

from torchmuster.core.files.layout import RunDir
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs.jobs import RecordedRequest
from torchmuster.launcher.model.job import JobRequest, NodeChunk

PROGRAM = ("$PYTHON", "/opt/muster/programs/__main__.py", "conduct")


@pytest.mark.parametrize(
    "words",
    [
        ("--run-dir=/runs/old", "--engine=slurm", "--warn=60"),
        ("/runs/old", "--engine", "slurm", "--warn", "60"),  # of an earlier version
    ],
)
def test_the_next_job_conducts_the_new_run(words):
    job = JobRequest(
        name="old",
        chunks=(NodeChunk(num_nodes=2),),
        head=(*PROGRAM, *words),
        log_path="/runs/old/job.log",
        python="python3",
    )
    again = RecordedRequest(dialect=load_dialect("slurm"), request=job, num_more=0)
    renamed = again.renamed(RunDir("/runs/20270115-080000-new-3f2a"))
    own = ("--run-dir=/runs/20270115-080000-new-3f2a", "--engine=slurm", "--warn=60")
    assert renamed.head == (*PROGRAM, *own)
    assert (renamed.name, renamed.chunks) == ("new-3f2a", job.chunks)
    assert renamed.log_path.startswith("/runs/20270115-080000-new-3f2a/")


def test_a_job_of_pods_has_no_words_of_ours():
    job = JobRequest(name="old", chunks=(NodeChunk(),), head=(), log_path="/x", python="python3")
    again = RecordedRequest(dialect=load_dialect("slurm"), request=job, num_more=0)
    assert again.renamed(RunDir("/runs/new")).head == ()
