"""The folder that an agent's disk checks is that of its first welcome."""

from collections.abc import Callable
from types import SimpleNamespace

from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.net.messages import Welcome
from torchmuster.core.node.agent import Agent


def ignore(*_):
    """Do nothing."""


def test_files_of_a_second_run_are_written_after_a_head_began_anew(tmp_path):
    lost: list[str] = []
    disk = DiskWriter(lambda lines, why: lost.append(why))
    disk.start()
    agent = SimpleNamespace(
        welcome=None,
        disk=disk,
        options=SimpleNamespace(
            run_directory=lambda run_id: RunDir(str(tmp_path / run_id)), is_head=False
        ),
        link=SimpleNamespace(welcome=ignore),
        voice=SimpleNamespace(say=ignore),
        spawners=SimpleNamespace(announce=ignore),
        attempts=SimpleNamespace(kill=ignore),
        _unsaid=[],
    )
    take: Callable[..., None] = Agent._take_welcome
    for run_id in ("a", "b"):
        take(
            agent, Welcome(run_id=run_id, node="n2", tee="0", head_pid=1, boot_id="", network_id="")
        )
        disk.append(str(tmp_path / run_id / "out.log"), b"line\n")
        assert disk.flush(10.0)
    assert [(tmp_path / name / "out.log").read_text() for name in ("a", "b")] == ["line\n"] * 2
    assert lost == []
