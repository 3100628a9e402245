"""Standard input of a run, from terminals of all kinds."""

import os
import pty
import sys

import pytest

from kit.command import ran

ASK = "from torchmuster.core.owner.parts import _is_in_background; print(_is_in_background())"


@pytest.fixture
def terminal():
    ends = pty.openpty()
    yield ends[1]
    for fd in ends:
        os.close(fd)


def test_a_terminal_that_does_not_control_us_may_be_read(terminal):
    """As in a session of its own, started from a terminal: asking for its foreground group is an error."""
    done = ran([sys.executable, "-c", ASK], stdin=terminal, start_new_session=True)

    assert (done.stdout, done.stderr) == ("False\n", "")
