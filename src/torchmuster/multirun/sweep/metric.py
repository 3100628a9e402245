"""Read the values of a metric that a member has recorded or printed."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field

from torchmuster.core.files.layout import RunDir
from torchmuster.core.owner.record import DAMAGED, RecordTail, next_attempt
from torchmuster.core.plainfile import open_plain

_NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
_MOST_BYTES = 4 << 20  # of a log, in one read
_MOST_LINE = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One value; `step` is the library's step, or counts the log lines with a value, from 1."""

    step: int
    value: float


def metric_pattern(name: str) -> re.Pattern[str]:
    """Return a pattern for `loss=0.1`, `loss: 0.1` and `"loss": 0.1`, but not `val_loss: 0.1`."""
    return re.compile(
        rf"(?<![\w./-]){re.escape(name)}[\"']?\s*[=:]\s*({_NUMBER})(?![\w.]*\w)", re.IGNORECASE
    )


@dataclass(slots=True)
class MetricReader:
    """Reads the points of one member, each once.

    They come from the training library's record if it has the metric, otherwise from the log.

    Args:
        run_dir: The run directory of the member.
        name: The name of the metric.
    """

    run_dir: RunDir
    name: str
    newest: MetricPoint | None = None
    _record: RecordTail = field(init=False)
    _pattern: re.Pattern[str] = field(init=False)
    _is_recorded: bool = False
    _log: str | None = None
    _position: int = 0
    _rest: str = ""
    _num_lines: int = 0

    def __post_init__(self) -> None:
        self._record = RecordTail(self.run_dir.training)
        self._pattern = metric_pattern(self.name)

    def read(self) -> list[MetricPoint]:
        """Return the points added since the last call."""
        points = self._recorded()
        if not self._is_recorded:
            points = self._printed()
        if points:
            self.newest = points[-1]
        return points

    def _recorded(self) -> list[MetricPoint]:
        points: list[MetricPoint] = []
        for event in self._record.read()[0]:
            with suppress(*DAMAGED):
                values = event["values"]
                points.append(MetricPoint(step=int(event["step"]), value=float(values[self.name])))
        self._is_recorded = self._is_recorded or bool(points)
        return points

    def _printed(self) -> list[MetricPoint]:
        log = self.run_dir.rank_log(max(0, next_attempt(self.run_dir) - 1), 0)
        if log != self._log:
            self._log, self._position, self._rest, self._num_lines = log, 0, "", 0
        try:
            with open_plain(log) as file:
                size = os.fstat(file.fileno()).st_size
                if size - self._position > _MOST_BYTES:
                    self._position, self._rest = size - _MOST_BYTES, ""
                file.seek(self._position)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        self._position += len(data)
        text = self._rest + data.decode(errors="replace")
        # A progress bar writes carriage returns.
        *lines, rest = re.split(r"[\r\n]", text)
        self._rest = rest[-_MOST_LINE:]
        return [point for line in lines if (point := self._of_line(line)) is not None]

    def last_line(self) -> list[MetricPoint]:
        """Return the point in a last, unterminated line, once the log is complete."""
        line, self._rest = self._rest, ""
        point = self._of_line(line) if line and not self._is_recorded else None
        self.newest = point or self.newest
        return [point] if point is not None else []

    def _of_line(self, line: str) -> MetricPoint | None:
        found = self._pattern.findall(line[:_MOST_LINE])
        if not found:
            return None
        self._num_lines += 1
        return MetricPoint(step=self._num_lines, value=float(found[-1]))
