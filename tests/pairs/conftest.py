"""What tests of two features at once have: a home of their own, one training, and `muster`."""

import json
import subprocess
from pathlib import Path

import pytest

from kit.command import MUSTER, Child, muster_env

SCRIPT = str(Path(__file__).with_name("train.py"))


class User:
    """Types commands in a folder of its own, and reads what is left there.

    Attributes:
        folder: Where it is; its home is below.
        env: Variables of each command.
    """

    def __init__(self, folder):
        self.folder, self.env = folder, muster_env(folder / "home", MUSTER_ON="local")

    def __call__(self, *words, code=None, limit_s=120.0):
        """Run `muster` to its end and return it; fail where its exit code is another than `code`."""
        argv = [*MUSTER, *map(str, words)]
        options = {"env": self.env, "cwd": self.folder, "capture_output": True, "text": True}
        ended = subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=limit_s, **options)
        assert code is None or ended.returncode == code, ended.stdout + ended.stderr
        return ended

    def popen(self, *words, **options):
        """Start `muster` and return the process."""
        argv = [*MUSTER, *map(str, words)]
        return Child(argv, env=self.env, cwd=self.folder, text=True, **options)

    def run_dirs(self, pattern="[!.]*"):
        """Return the run directories, the oldest first."""
        return sorted((self.folder / "home" / "runs").glob(pattern))

    def trained(self):
        """Return the records that tell of steps: before its first one a training is ended by a SIGTERM, unsaved."""
        records = (self.folder / "home" / "runs").rglob("training.jsonl")
        return [record for record in records if '"event": "metrics"' in record.read_text()]

    def events(self, pattern="[!.]*"):
        """Return the events of a run's training."""
        (found,) = self.run_dirs(pattern)
        return [json.loads(line) for line in (found / "training.jsonl").read_text().splitlines()]


@pytest.fixture
def user(tmp_path):
    return User(tmp_path)
