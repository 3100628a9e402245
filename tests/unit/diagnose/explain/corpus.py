"""The incidents under tests/logs: folders of logs as users have them, each with the cause that is right."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.scan import read_logs

ROOT = Path(__file__).parents[4]
LOGS = ROOT / "tests" / "logs"
HEALTHY = "healthy"


@dataclass(frozen=True)
class Incident:
    name: str
    right: tuple[str, ...]
    origin: str
    root: Path = LOGS

    @property
    def folder(self):
        return self.root / self.name

    @property
    def is_held_out(self):
        """Say whether the rules were made without it: by the first digit of its name's hash."""
        return int(hashlib.sha256(self.name.encode()).hexdigest()[0], 16) % 2 == 1

    @property
    def files(self):
        found = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return [path for path in found if path.name != "expect.json"]


def incidents_under(root):
    """Return the incidents of a folder, by name."""
    found = []
    for path in sorted(root.glob("*/expect.json")):
        expected = json.loads(path.read_text())
        right = (expected["cause"], *expected["also_right"])
        found.append(Incident(path.parent.name, right, expected["from"], root))
    return tuple(found)


@cache
def incidents():
    return incidents_under(LOGS)


@cache
def verdict_on(name):
    files = [str(path) for path in Incident(name, (), "").files]
    return judge(Case(read_logs(files, year=2025)))


def said(verdict):
    """Return the cause as a word."""
    if verdict.healthy:
        return HEALTHY
    return verdict.first.cause if verdict.first else "unknown"


def wrong_ones(chosen):
    """Return what is wrong: its name, the word that was expected, the word that was said, and how surely."""
    found = []
    for incident in chosen:
        verdict = judge(Case(read_logs([str(path) for path in incident.files], year=2025)))
        if said(verdict) not in incident.right:
            sure = verdict.first.confidence.value if verdict.first else "-"
            found.append((incident.name, incident.right[0], said(verdict), sure))
    return found


def score(held_out):
    """Return how many are right, of how many, and which are wrong with confidence."""
    chosen = [incident for incident in incidents() if incident.is_held_out == held_out]
    wrong = [one for one in chosen if said(verdict_on(one.name)) not in one.right]
    sure = [one.name for one in wrong if _is_sure(verdict_on(one.name))]
    return len(chosen) - len(wrong), len(chosen), sure


def _is_sure(verdict):
    return verdict.first is not None and verdict.first.confidence.value == "high"
