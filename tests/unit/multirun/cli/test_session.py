"""`muster session end` where the doors still have a run."""

import contextlib
from types import SimpleNamespace

import pytest

from kit.records import make_run, result
from torchmuster.errors import UsageError
from torchmuster.multirun.cli import session

RUN_ID = "20260101-000000-train-ab12"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_session_ends_although_the_agents_of_a_run_with_a_result_have_not_left(
    tmp_path, monkeypatch, is_known
):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    if is_known:
        make_run(tmp_path / "runs" / RUN_ID, run_id=RUN_ID, ended=result())
    monkeypatch.setattr(session, "find_session", lambda name: SimpleNamespace(run_dir=tmp_path))
    view = SimpleNamespace(state=SimpleNamespace(run_id=RUN_ID))
    monkeypatch.setattr(session, "_view", lambda run_dir: view)
    over = []
    monkeypatch.setattr(session, "end_session", lambda run_dir, name: over.append(name))
    busy = pytest.raises(UsageError, match=f"the run {RUN_ID} is in the session main")
    with contextlib.nullcontext() if is_known else busy:  # one of another directory may go on
        session.end.callback(None, None)
    assert over == (["main"] if is_known else [])
