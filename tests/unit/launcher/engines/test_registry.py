"""Which engines there are, and what others may add."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from torchmuster.errors import ManyErrors, UsageError
from torchmuster.launcher.engines.registry import (
    GROUP,
    Schedulers,
    dialect_of_record,
    engine_entries,
    load_dialect,
)
from torchmuster.launcher.engines.schedulers import SCHEDULERS, set_by_schedulers
from torchmuster.launcher.engines.sites import job_of_site
from torchmuster.launcher.spec.site import load_sites


def point(name, value):
    return EntryPoint(name=name, value=value, group=GROUP)


@pytest.mark.parametrize("name", engine_entries(()))
def test_dialect_has_the_name_of_its_entry(name):
    assert load_dialect(name).name == name


def test_entry_point_adds_an_engine():
    entries = engine_entries([point("lsf", "torchmuster.launcher.engines.slurm")])
    assert load_dialect("lsf", entries).name == "slurm"


def test_clash_names_both():
    with pytest.raises(UsageError, match=r"`slurm`: torchmuster and my_slurm\.dialect"):
        engine_entries([point("slurm", "my_slurm.dialect")])


def test_two_strangers_clash():
    with pytest.raises(UsageError, match=r"a\.b and c\.d"):
        engine_entries([point("lsf", "a.b"), point("lsf", "c.d")])


def test_nobody_takes_the_name_local():
    with pytest.raises(UsageError, match="`local`"):
        engine_entries([point("local", "x.y")])


def test_unknown_engine_has_a_near_miss():
    with pytest.raises(UsageError) as caught:
        load_dialect("slrum")
    assert caught.value.fix == "did you mean `slurm`?"


@pytest.mark.parametrize("module", ["no.such.module", "torchmuster.launcher.engines.base"])
def test_module_that_is_none_is_an_error(module):
    with pytest.raises(UsageError, match="can't be loaded"):
        load_dialect("lsf", engine_entries([point("lsf", module)]))


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
    return Schedulers(engine_entries([point("lsf", "lsf_engine")]))


def test_a_dialect_of_another_package_says_what_is_fixed_of_it(lsf):
    facts = lsf["lsf"]
    assert (facts.source, facts.tools) == ("lsf_engine", ("bsub", "bjobs"))
    assert set_by_schedulers(LsfDialect()) == ("SLURM_", "SLURMD_", "PBS_", "LSB_")


def test_its_own_keys_are_keys_of_its_sites(lsf, tmp_path):
    text = "[engines.lsf]\nservice_class = 'night'\nqueue = 'q'\n[engines.slurm]\n"
    (tmp_path / "muster.toml").write_text(text)
    site = load_sites(str(tmp_path), {"HOME": "/nonexistent"}, lsf).get("lsf")
    assert job_of_site(site).own_keys == (("service_class", "night"),)

    for wrong in ("service_class = 'a b'", "service_class = 3", "service_clas = 'night'"):
        (tmp_path / "muster.toml").write_text(f"[engines.lsf]\n{wrong}\n")
        with pytest.raises(ManyErrors):
            load_sites(str(tmp_path), {"HOME": "/nonexistent"}, lsf)
    (tmp_path / "muster.toml").write_text("[engines.slurm]\nservice_class = 'night'\n")
    with pytest.raises(ManyErrors):
        load_sites(str(tmp_path), {"HOME": "/nonexistent"}, lsf)


def test_a_dialect_is_loaded_only_for_what_it_says(lsf, monkeypatch):
    monkeypatch.delitem(sys.modules, "lsf_engine")
    assert "lsf" in lsf
    assert list(lsf) == [*SCHEDULERS, "lsf"]
    assert lsf["slurm"].client == "sbatch"
    assert lsf["lsf"].tools == (), "one that can't be loaded is told when it is named"


def test_a_removed_engine_is_refused_and_its_runs_are_asked_for_by_another():
    with pytest.raises(UsageError, match="muster submits no jobs to Torque"):
        load_dialect("torque")
    assert dialect_of_record("torque").name == "pbs"
    assert dialect_of_record("slurm").name == "slurm"
