"""A host of ssh, by what has been heard of it."""

import pytest

from torchmuster.core.files.layout import RunDir
from torchmuster.launcher.engines.ssh_command import SshHost
from torchmuster.launcher.engines.ssh_host import Bundle, RemoteHost


@pytest.mark.parametrize(("silent_s", "is_answering"), [(0.0, True), (9.0, True), (11.0, False)])
def test_a_host_whose_session_is_open_and_silent_does_not_answer(tmp_path, silent_s, is_answering):
    bundle = Bundle(ssh=("ssh",), sha="", root="", files=())
    host = RemoteHost(SshHost(name="n1"), bundle, RunDir(str(tmp_path)))
    host.last_heard -= silent_s
    assert host.is_usable
    assert host.is_answering == is_answering
