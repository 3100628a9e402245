"""The incidents under tests/incidents: logs as users have them, each with the cause that is right."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.logs import read_logs

ROOT = Path(__file__).parents[4]
INCIDENTS = ROOT / "tests" / "incidents"
HEALTHY = "healthy"


@dataclass(frozen=True)
class Incident:
    name: str
    right: tuple[str, ...]
    origin: str
    set: str

    @property
    def files(self):
        found = (path for path in sorted((INCIDENTS / self.name).rglob("*")) if path.is_file())
        return [path for path in found if path.name != "expect.json"]


@cache
def incidents(*sets):
    """Return the incidents of these sets, by name; all without one."""
    found = []
    for path in sorted(INCIDENTS.glob("*/expect.json")):
        expected = json.loads(path.read_text())
        right = (expected["cause"], *expected["also_right"])
        found.append(Incident(path.parent.name, right, expected["from"], expected["set"]))
    return tuple(one for one in found if not sets or one.set in sets)


@cache
def verdict_on(name):
    files = [str(path) for path in Incident(name, (), "", "").files]
    return judge(Case(read_logs(files, year=2025)))


def said(verdict):
    """Return the cause as a word."""
    if verdict.healthy:
        return HEALTHY
    return verdict.first.cause if verdict.first else "unknown"


def wrong_ones(*sets):
    """Return what is wrong in these sets: its name, the words that are right, the word that was said, and how surely."""
    found = []
    for incident in incidents(*sets):
        verdict = verdict_on(incident.name)
        if said(verdict) not in incident.right:
            sure = verdict.first.confidence.value if verdict.first else "-"
            found.append((incident.name, incident.right[0], said(verdict), sure))
    return found
