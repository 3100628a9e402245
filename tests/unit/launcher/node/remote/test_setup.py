"""Where a run lives on a host: whether a folder of the same path and token is the client's own tells its mark."""

import os
import sys

import pytest

from kit.values import run_plan
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.plan import ScriptKind
from torchmuster.launcher.net.remote_messages import SetUpRun
from torchmuster.launcher.node.remote.files import MARK_FILE, TOKEN_FILE, write_private
from torchmuster.launcher.node.remote.main import RemotePlace

TOKEN = "ab" * 16


@pytest.fixture
def message(tmp_path, monkeypatch):
    """A set-up whose client's run directory has the path of the host's own, as the first pod's has in other pods."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    plan = run_plan(
        kind=ScriptKind.COMMAND, target="true", python=(sys.executable,), node_names=("n1",)
    )

    def make(mark):
        return SetUpRun(
            plan=plan,
            run_dir=str(tmp_path / "runs" / "r"),
            token=TOKEN,
            may_share=True,
            secret="cd" * 32,
            script=None,
            code_root="/",
            mark=mark,
        )

    return make


def test_own_folder_of_an_earlier_session_is_not_taken_for_the_clients(message):
    first = RemotePlace(message("of the client"))
    first.write_run()
    first.remove_secret()
    again = RemotePlace(message("of the client"))
    assert again.is_own
    again.write_run()
    assert os.path.exists(again.run_dir.secret)


def test_a_folder_with_the_clients_token_and_mark_is_shared(message, tmp_path):
    run_dir = RunDir(str(tmp_path / "runs" / "r"))
    os.makedirs(run_dir.path)
    write_private(os.path.join(run_dir.path, TOKEN_FILE), TOKEN)
    assert not RemotePlace(message("")).is_own
    write_private(os.path.join(run_dir.path, MARK_FILE), "m")
    assert not RemotePlace(message("m")).is_own
