"""The events that parts of the launcher add to the record of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchmuster.core.model.events import RecordEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """An unused interface, and the reason in a few words."""

    name: str
    why: str


# Source and target by index, why the target is unreachable (or None), microseconds and MB/s.
PairRow = tuple[int, int, str | None, float | None, float | None]


def significant(number: float) -> str:
    """Return a number with two significant digits: 23, 1.8, 0.05, 120."""
    if number <= 0:
        return "0"
    digits = f"{number:.1e}"
    rounded = float(digits)
    decimals = max(1 - int(digits.partition("e")[2]), 0)
    text = f"{rounded:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class HeadReplacedEvent(RecordEvent):
    """Another node conducts the run, from this attempt on."""

    node: str
    before: str = ""
    attempt: int = 0

    def narration(self) -> str | None:
        what = f"the head on {self.before} was lost"
        return f"{what}: {self.node} takes its place with attempt {self.attempt}"


class HangEvent(RecordEvent):
    """A rank makes no progress.

    Attributes:
        silent_s: Seconds without progress.
        limit_s: Seconds after which this counts as a hang.
        ended: The rank is ended because of it.
        stacks: The file with the stacks of all ranks.
        sentence: Where all ranks are.
    """

    text: str
    attempt: int = 0
    rank: int | None = None
    node: str | None = None
    silent_s: float = 0.0
    limit_s: float = 0.0
    ended: bool = False
    stacks: str | None = None
    sentence: str = ""

    def narration(self) -> str | None:
        return self.text


class StartWaitEvent(RecordEvent):
    """Workers wait for each other while starting."""

    text: str
    attempt: int = 0

    def narration(self) -> str | None:
        return self.text


class StragglerEvent(RecordEvent):
    """A rank is slower than the others."""

    text: str
    rank: int
    node: str = ""
    part: str = ""

    def narration(self) -> str | None:
        return self.text


class NetworkEvent(RecordEvent):
    """The network that workers use.

    Attributes:
        pairs: Measured pairs, by index in `nodes`.
        survey_s: Duration of the measurement.
        waited_s: How long workers waited for it.
    """

    interface: str
    subnet: str = ""
    num_nodes: int = 0
    nodes: tuple[str, ...] = ()
    pairs: tuple[PairRow, ...] = ()
    gbit_per_s: str | None = None
    latency_s: float | None = None
    unused: tuple[Unused, ...] = ()
    survey_s: float = 0.0
    waited_s: float = 0.0

    def narration(self) -> str | None:
        parts = [f"{self.interface} ({self.subnet})", f"{self.num_nodes} nodes"]
        if self.gbit_per_s is not None:
            parts.append(f"{self.gbit_per_s} Gbit/s")
        if self.latency_s is not None:
            parts.append(f"{significant(self.latency_s * 1000)} ms")
        unused = [f"{one.name} ({one.why})" for one in self.unused[:8]]
        if len(self.unused) > 8:
            unused.append(f"{len(self.unused) - 8} more")
        return f"network: {', '.join(parts)}" + (
            f"; not used: {', '.join(unused)}" if unused else ""
        )


class PreflightEvent(RecordEvent):
    """The nodes were checked before the start.

    Attributes:
        form: Which form of preflight.
        findings: Its findings (`diagnose.doctor`).
        software: Versions and hardware, one row for each kind of node.
        nodes: In the long form, one row for each node; `pairs` as in `NetworkEvent`.
        held_s: How long workers waited for it.
    """

    form: str = ""
    findings: tuple[dict[str, Any], ...] = ()
    num_nodes: int = 0
    took_s: float = 0.0
    held_s: float = 0.0
    software: tuple[dict[str, Any], ...] = ()
    nodes: tuple[dict[str, Any], ...] = ()
    pairs: tuple[PairRow, ...] = ()

    def narration(self) -> str | None:
        """Return what failed and what warns; `muster doctor` shows all findings itself."""
        if self.form == "long":
            return None
        lines = [_finding(finding) for finding in self.findings if finding.get("level") != "note"]
        return "\n".join(lines) or None


class WorkerProcessEvent(RecordEvent):
    """The process of a sweep member that runs without a head."""

    attempt: int
    pid: int
    folder: str = ""


def _finding(finding: Mapping[str, Any]) -> str:
    reasons = finding.get("because")
    because = "; ".join(map(str, reasons[:2] if isinstance(reasons, list) else ()))
    hint = finding.get("hint")
    text = f"preflight {finding.get('level')}: {finding.get('error')}"
    text += f" ({because})" if because else ""
    return text + (f"; {hint}" if hint else "")
