"""Which engines there are, and what others may add."""

from importlib.metadata import EntryPoint

import pytest

from torchmuster.engines.registry import GROUP, engine_entries, load_dialect
from torchmuster.errors import UsageError


def point(name, value):
    return EntryPoint(name=name, value=value, group=GROUP)


@pytest.mark.parametrize("name", engine_entries(()))
def test_dialect_has_the_name_of_its_entry(name):
    assert load_dialect(name).name == name


def test_entry_point_adds_an_engine():
    entries = engine_entries([point("lsf", "torchmuster.engines.slurm")])
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


@pytest.mark.parametrize("module", ["no.such.module", "torchmuster.engines.base"])
def test_module_that_is_none_is_an_error(module):
    with pytest.raises(UsageError, match="can't be loaded"):
        load_dialect("lsf", engine_entries([point("lsf", module)]))
