"""`muster torchrun` as its tests start it: in a folder of its own, without what a job around them has set."""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from kit.command import MUSTER, SOURCE, spawned

LIMIT_S = 120


@dataclass
class Launch:
    """One `muster torchrun`."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def begin(self, *words: str, **env: str) -> subprocess.Popen:
        (self.folder / "told").mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "MUSTER_"))}
        kept.pop("OMP_NUM_THREADS", None)
        ours = {
            "PYTHONPATH": str(SOURCE),
            "MUSTER_HOME": str(self.folder / "home"),
            "TOLD": str(self.folder / "told"),
        }
        return spawned(
            [*MUSTER, "torchrun", *words],
            env={**kept, **ours, **self.env, **env},
            cwd=self.folder,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess:
        return end(self.begin(*words, **env))

    def told(self) -> list[dict]:
        found = [json.loads(path.read_text()) for path in (self.folder / "told").iterdir()]
        return sorted(found, key=lambda told: int(told["RANK"]))


def end(process: subprocess.Popen) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"it does not end\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
