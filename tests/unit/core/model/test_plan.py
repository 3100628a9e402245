import sys

from kit.values import program, run_plan
from torchmuster.core.model.plan import ScriptKind, look_for_torch


def plan(**given):
    return run_plan(**{"max_nodes": 3, "workers_per_node": (4, 2), "node_names": ("n1",), **given})


def test_a_place_beyond_the_end_takes_the_last_number_of_workers():
    assert [plan().num_workers(place) for place in range(4)] == [4, 2, 2, 2]


def test_a_place_without_a_name_is_called_by_its_number():
    assert [plan().node_name(place) for place in range(2)] == ["n1", "node 1"]


def test_a_plan_is_elastic_when_its_number_of_nodes_may_change():
    assert plan().is_elastic
    assert not plan(min_nodes=3).is_elastic


def test_a_module_is_displayed_with_its_flag():
    assert program("a.b", kind=ScriptKind.MODULE, args=("-x",)).display() == ("-m", "a.b", "-x")


def test_a_longer_wait_is_spelled_as_the_command_that_made_the_plan_takes_it():
    assert plan().longer_wait == "`--join-timeout 1200s`"
    assert plan(engine="torchrun").longer_wait == "`--rdzv-conf join_timeout=1200`"


# torch's version from its files, without importing it.


VERSION = """from typing import Optional
__version__ = '2.13.0+cu126'
debug = False
cuda: Optional[str] = '12.6'
hip: Optional[str] = None
"""


def write_torch(folder, text=VERSION):
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / "torch" / "version.py").write_text(text)
    (folder / "nvidia_nccl_cu12-2.27.5.dist-info").mkdir()


def test_versions_are_read_as_text(tmp_path, monkeypatch):
    write_torch(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = look_for_torch()
    assert (found["torch"], found["cuda"], found["hip"]) == ("2.13.0+cu126", "12.6", None)
    assert (found["nccl"], found["is_known"]) == ("2.27.5", True)


def test_no_torch_is_known_to_be_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = look_for_torch()
    assert (found["torch"], found["is_known"]) == (None, True)


def test_a_torch_that_does_not_tell_its_version_is_not_called_missing(tmp_path, monkeypatch):
    write_torch(tmp_path, "git_version = 'x'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = look_for_torch()
    assert (found["torch"], found["is_known"]) == (None, False)


def test_a_finder_that_breaks_costs_nothing(tmp_path, monkeypatch):
    class Broken:
        def find_spec(self, name, path=None):
            raise RuntimeError(name)

    write_torch(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert look_for_torch()["torch"] == "2.13.0+cu126"
