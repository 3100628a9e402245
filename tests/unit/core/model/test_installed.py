"""torch's version from its files, without importing it."""

import sys

from torchmuster.core.model.plan import look_for_torch

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
