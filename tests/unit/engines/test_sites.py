"""From a section of `muster.toml` to the options of a job."""

from dataclasses import replace

import pytest

from torchmuster.engines.registry import load_dialect
from torchmuster.engines.sites import site_options, with_site_time
from torchmuster.engines.workflow_jobs import GroupJob, SiteOptions
from torchmuster.spec.sites.site import Site
from unit.engines.jobs import JOBS


def test_a_kind_without_a_section_has_the_usual_options():
    assert site_options(Site(name="slurm", kind="slurm")) == SiteOptions()


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
        }
    )
    assert site_options(site) == SiteOptions(
        queue="q",
        account="a",
        directives=("-P p", "-m n"),
        setup=("export A='it'\"'\"'s'", "module load x"),
        extra=(("sales_op", "blanca"),),
        warn_s=60.0,
    )


@pytest.mark.parametrize(("own_s", "expected_s"), [(None, 7200.0), (60.0, 60.0)])
def test_the_sites_time_is_for_groups_without_one(own_s, expected_s):
    dialect = load_dialect("pbs")
    job = replace(JOBS["plain"], time_limit_s=own_s, warn_s=120.0)
    said = ("exec_timeout: none given", *dialect.unmapped(job))
    group = GroupJob(group="g", job=job, waits_for=(), node_tasks=("t",), warnings=said)
    site = Site.model_validate({"name": "x", "kind": "pbs", "time": "2h"})
    done = with_site_time(group, site, dialect)
    assert done.job.time_limit_s == expected_s
    assert (done.warnings == ()) is (own_s is None)
