"""Fixtures of real hosts that are reached by ssh."""

import os

import pytest

from ssh.hosts import Hosts, why_not


@pytest.fixture
def hosts(tmp_path):
    """Return a place for hosts; they end with the test."""
    if (reason := why_not()) is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    made = Hosts(tmp_path)
    yield made
    made.close()
