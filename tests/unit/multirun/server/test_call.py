"""The client's end of a door's socket."""

import os
import socket

import pytest

from torchmuster.errors import ChannelError
from torchmuster.multirun.server import messages
from torchmuster.multirun.server.call import send_order


def test_a_door_that_has_gone_since_it_was_called_is_an_error_of_the_session():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    before = len(os.listdir("/proc/self/fd"))
    with ours, pytest.raises(ChannelError, match="does not answer"):
        send_order(ours, messages.AskServerState())
    assert len(os.listdir("/proc/self/fd")) == before - 1  # `ours` alone was closed
