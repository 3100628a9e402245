"""What a scheduler says to a cancel that it refuses."""

import pytest

from torchmuster.core import proc
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs import jobs


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("qdel: Server could not connect to MOM 10.ctl", "qdel -W force JOB"),  # recorded
        ("qdel: something new", None),
    ],
)
def test_a_job_whose_first_host_is_dead_is_taken_from_the_server_by_force(monkeypatch, said, hint):
    answer = proc.CommandOutput(status=1, stdout=b"", stderr=f"{said}\n".encode())
    monkeypatch.setattr(jobs, "_ask", lambda *_: answer)
    with pytest.raises(EngineError) as caught:
        jobs.cancel_job(load_dialect("pbs"), "10.ctl")
    assert caught.value.why == said
    assert caught.value.fix is None if hint is None else hint in caught.value.fix
