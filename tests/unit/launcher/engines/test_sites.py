"""From a section of `muster.toml` to the options of a job."""

from torchmuster.launcher.engines.sites import job_of_site
from torchmuster.launcher.model.job import JobRequest, NodeChunk
from torchmuster.launcher.spec.site import Site

BARE = {"name": "", "head": (), "log_path": ""}


def test_a_kind_without_a_section_asks_for_nothing_and_hears_of_the_end_in_time():
    job = job_of_site(Site(name="slurm", kind="slurm"))
    assert job == JobRequest(**BARE, chunks=(NodeChunk(),), node_lines=(), warn_s=120.0)


def test_everything_arrives():
    site = Site.model_validate(
        {
            "name": "x",
            "kind": "pbs",
            "queue": "q",
            "account": "a",
            "project": "p",
            "directives": ["-m n"],
            "chunk": {"sales_op": "blanca"},
            "setup": ["module load x"],
            "environment": {"A": "it's"},
            "warn": "1m",
            "time": "2h",
            "gpus_per_node": 4,
        }
    )
    assert job_of_site(site) == JobRequest(
        **BARE,
        chunks=(NodeChunk(gpus=4, extra=(("sales_op", "blanca"),)),),
        time_limit_s=7200.0,
        queue="q",
        account="a",
        directives=("-P p", "-m n"),
        node_lines=("export A='it'\"'\"'s'", "module load x"),
        warn_s=60.0,
    )
