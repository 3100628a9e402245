"""A run in the foreground of an ssh session says that it ends with it."""

import pytest

from torchmuster.core.owner import session

SSH = {"SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"}


@pytest.mark.parametrize("environment", [SSH, {"SSH_TTY": "/dev/pts/3"}])
def test_a_run_in_an_ssh_session_says_that_it_ends_with_it(environment):
    note = session._note(environment, on_terminal=True, outlives=False)
    assert note == "this run ends with your ssh session: --detach, tmux or screen keep it"


@pytest.mark.parametrize(
    ("environment", "on_terminal", "outlives"),
    [
        ({}, True, False),
        (SSH, False, False),  # in a script
        (SSH, True, True),  # under nohup
        (SSH | {"TMUX": "/tmp/tmux-0/default,1,0"}, True, False),
        (SSH | {"STY": "12.pts-0.n1"}, True, False),
    ],
)
def test_a_run_that_outlives_the_connection_says_nothing(environment, on_terminal, outlives):
    assert session._note(environment, on_terminal=on_terminal, outlives=outlives) is None
