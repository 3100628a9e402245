"""A member that is a single process and does not move is named, then ended."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.failure import EndKind
from torchmuster.core.model.plan import Limits
from torchmuster.multirun.sweep import watch as module
from torchmuster.multirun.sweep.watch import MemberWatch


def test_a_member_that_stands_is_named_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.1)
    run_dir, said = RunDir(str(tmp_path / "s.1")), []
    os.makedirs(run_dir.path)
    limits = Limits(hang_s=1.0, hang_blind_s=1.0, hang_most_s=2.0)
    disk = DiskWriter()
    disk.start()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            attempt = SimpleNamespace(attempt=0, running=[(0, child.pid)])
            one = MemberWatch(attempt, run_dir, str(tmp_path), "n1", limits, disk, said.append)
            end = asyncio.run(asyncio.wait_for(one.until_it_hangs(), 30.0))
        finally:
            child.kill()
    disk.flush(10.0)
    assert end.kind is EndKind.HANG
    assert "is stopped (SIGSTOP)" in said[0]
    events = [json.loads(line) for line in Path(run_dir.events).read_text().splitlines()]
    assert events[0]["event"] == "worker_process"
    assert events[0]["pid"] == child.pid
    assert [e["ended"] for e in events if e["event"] == "hang"] == [False, True]
