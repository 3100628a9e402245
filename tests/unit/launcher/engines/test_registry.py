"""Which engines there are, what others may add, what is told without loading one, and what a site asks of one."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from torchmuster.errors import ManyErrors, UsageError
from torchmuster.launcher.engines import registry
from torchmuster.launcher.engines.schedulers import SCHEDULERS, guard, own_jobs, set_by_schedulers
from torchmuster.launcher.engines.sites import job_of_site
from torchmuster.launcher.engines.wait_reasons import reasons_of
from torchmuster.launcher.model.job import JobRequest, NodeChunk
from torchmuster.launcher.spec.site import Site, load_sites


def point(name, value):
    return EntryPoint(name=name, value=value, group=registry.GROUP)


@pytest.mark.parametrize("name", registry.engine_entries(()))
def test_dialect_has_the_name_of_its_entry(name):
    assert registry.load_dialect(name).name == name


@pytest.mark.parametrize("name", ["slurm", "pbs"])
def test_every_engine_of_ours_has_a_table(name):
    assert reasons_of(registry.load_dialect(name)) is not None


def test_entry_point_adds_an_engine():
    entries = registry.engine_entries([point("lsf", "torchmuster.launcher.engines.slurm")])
    assert registry.load_dialect("lsf", entries).name == "slurm"


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([("slurm", "my_slurm.dialect")], r"`slurm`: torchmuster and my_slurm\.dialect"),
        ([("lsf", "a.b"), ("lsf", "c.d")], r"a\.b and c\.d"),
        ([("local", "x.y")], "`local`"),
    ],
    ids=["with ours", "of two strangers", "local"],
)
def test_a_clash_of_names_is_told_with_both(points, said):
    with pytest.raises(UsageError, match=said):
        registry.engine_entries([point(*one) for one in points])


def test_unknown_engine_has_a_near_miss():
    with pytest.raises(UsageError) as caught:
        registry.load_dialect("slrum")
    assert caught.value.fix == "did you mean `slurm`?"


@pytest.mark.parametrize("module", ["no.such.module", "torchmuster.launcher.engines.base"])
def test_module_that_is_none_is_an_error(module):
    with pytest.raises(UsageError, match="can't be loaded"):
        registry.load_dialect("lsf", registry.engine_entries([point("lsf", module)]))


class LsfDialect:
    name = "lsf"
    tools = ("bsub", "bjobs")
    variables = ("LSB_",)
    own_keys = ("service_class",)


@pytest.fixture
def lsf(monkeypatch):
    """All schedulers, with one of another package."""
    module = ModuleType("lsf_engine")
    module.DIALECT = LsfDialect()
    monkeypatch.setitem(sys.modules, "lsf_engine", module)
    return registry.Schedulers(registry.engine_entries([point("lsf", "lsf_engine")]))


def test_a_dialect_of_another_package_says_what_is_fixed_of_it(lsf):
    facts = lsf["lsf"]
    assert (facts.source, facts.tools) == ("lsf_engine", ("bsub", "bjobs"))
    assert set_by_schedulers(LsfDialect()) == ("SLURM_", "SLURMD_", "PBS_", "LSB_")


def test_its_own_keys_are_keys_of_its_sites(lsf, tmp_path):
    def sites(text):
        (tmp_path / "muster.toml").write_text(text)
        return load_sites(str(tmp_path), {"HOME": "/nonexistent"}, lsf)

    site = sites("[engines.lsf]\nservice_class = 'night'\nqueue = 'q'\n[engines.slurm]\n").get(
        "lsf"
    )
    assert job_of_site(site).own_keys == (("service_class", "night"),)

    of_lsf = ("service_class = 'a b'", "service_class = 3", "service_clas = 'night'")
    for wrong in ("slurm]\nservice_class = 'night'", *(f"lsf]\n{line}" for line in of_lsf)):
        with pytest.raises(ManyErrors):
            sites(f"[engines.{wrong}\n")


def test_a_dialect_is_loaded_only_for_what_it_says(lsf, monkeypatch):
    monkeypatch.delitem(sys.modules, "lsf_engine")
    assert "lsf" in lsf
    assert list(lsf) == [*SCHEDULERS, "lsf"]
    assert lsf["slurm"].client == "sbatch"
    assert lsf["lsf"].tools == (), "one that can't be loaded is told when it is named"


def test_a_removed_engine_is_refused_and_its_runs_are_asked_for_by_another():
    with pytest.raises(UsageError, match="muster submits no jobs to Torque"):
        registry.load_dialect("torque")
    assert registry.dialect_of_record("torque").name == "pbs"
    assert registry.dialect_of_record("slurm").name == "slurm"


def on_path(*names):
    return lambda name: f"/usr/bin/{name}" if name in names else None


def test_a_machine_without_a_scheduler_is_free():
    assert guard({}, on_path("ssh")) is None


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID"])
def test_inside_a_job_is_free_but_an_empty_variable_is_none(name):
    assert guard({name: "7"}, on_path("sbatch", "qsub")) is None
    assert guard({name: ""}, on_path("sbatch", "qsub")) is not None


@pytest.mark.parametrize(
    ("commands", "sites", "offers"),
    [
        (("sbatch",), (), "--on slurm submits"),
        (("qsub",), (), "--on pbs submits"),
        (("sbatch", "qsub"), (), "--on slurm or --on pbs submits"),
        (("sbatch",), ("gpu", "slurm"), "--on gpu or --on slurm submits"),
    ],
)
def test_a_login_node_is_refused_with_own_sites_and_the_engines_found(commands, sites, offers):
    error = guard({}, on_path(*commands), sites)
    assert error.exit_code == 2
    assert error.fix.startswith(offers)
    assert "--here" in error.fix
    assert all(f"/usr/bin/{name}" in error.where for name in commands)


@pytest.mark.parametrize(
    ("environment", "jobs"),
    [
        ({}, ()),
        ({"SLURM_JOB_ID": "12"}, ("SLURM_JOB_ID=12",)),
        ({"PBS_JOBID": "1053[2].server"}, ("PBS_JOBID=1053[2].server",)),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, ("LSB_JOBID=7",)),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "3"}, ("LSB_JOBID=7[3]",)),
        (
            {"SLURM_JOB_ID": "13", "SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "12"},
            ("SLURM_JOB_ID=12",),
        ),
        ({"SLURM_JOB_ID": "13", "SLURM_HET_SIZE": "2"}, ()),
        ({"SLURM_JOB_ID": ""}, ()),
    ],
)
def test_the_scheduler_s_variables_name_the_job(environment, jobs):
    assert own_jobs(environment) == jobs


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
