"""Folders that many tests of the launcher begin with."""

import pytest

from torchmuster.core.files.layout import RunDir


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return the folder of a user's runs and settings, which is not there yet."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run_dir(tmp_path):
    """Return the directory of a run, an empty one."""
    return RunDir(str(tmp_path))
