"""Fixtures of real hosts that are reached by ssh."""

import pytest

from kit import missing
from ssh.hosts import SshHosts, why_not


@pytest.fixture
def hosts(tmp_path):
    """Return a place for hosts; they end with the test."""
    if (reason := why_not()) is not None:
        missing.stop(reason)
    made = SshHosts(tmp_path)
    yield made
    made.close()
