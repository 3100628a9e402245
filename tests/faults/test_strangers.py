"""Who has not proved that he may gets nothing: also where nodes have no common key, whose channel anybody can open."""

import asyncio
import hashlib
import os
import subprocess

import pytest

from kit.command import MUSTER
from kit.ports import reserve_port
from torchmuster.core.net.channel import ChannelClosedError, HandshakeError, Role, connect
from torchmuster.launcher.net.part_messages import ExecStart

LIMIT_S = 180.0
WAITS = "import os, signal; os.write(1, b'began\\n'); signal.pause()\n"


@pytest.fixture
def head(tmp_path):
    """Start the head of a `muster torchrun` whose nodes have no common key; return its port."""
    port = reserve_port()
    (tmp_path / "train.py").write_text(WAITS)
    argv = [
        *MUSTER,
        "torchrun",
        "--nnodes=1:2",
        "--rdzv-id=7",
        "--rdzv-conf=last_call_timeout=1",
    ]
    argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "train.py"]
    env = {**os.environ, "HOME": str(tmp_path), "MUSTER_HOME": str(tmp_path / "runs")}
    process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert "began" in process.stdout.readline()
        yield port
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("claims_to_be_open", [True, False])
def test_a_stranger_with_the_public_key_runs_no_command(head, tmp_path, claims_to_be_open):
    public = hashlib.sha256(b"muster, not authenticated: torchrun 7").digest()
    mark = tmp_path / "mark"

    async def attack():
        channel = await connect("127.0.0.1", head, Role.CLIENT, public, is_open=claims_to_be_open)
        for task in ("rank 0", "node 0"):
            channel.send_nowait(ExecStart(exec_id=task, task=task, argv=("touch", str(mark))))
        async with asyncio.timeout(LIMIT_S):
            while True:
                await channel.receive()

    with pytest.raises((ChannelClosedError, HandshakeError)):
        asyncio.run(attack())
    assert not mark.exists()
