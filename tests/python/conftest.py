"""A client in Python: a home and a folder of code of its own, in this very process."""

import sys

import pytest

from cluster.conftest import login, slurm_lab
from torchmuster.launcher.api import launch as module

__all__ = ["login", "slurm_lab"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return the client's folder: its working directory, where it finds modules too."""
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(code)
    monkeypatch.syspath_prepend(str(code))
    before = set(sys.modules)
    yield code
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(code)):
            del sys.modules[name]
    for owner in module._owners:
        assert owner.wait(60) is not None
