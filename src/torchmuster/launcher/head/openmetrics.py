"""Metrics of a run in OpenMetrics 1.0 text, from a sample of all ranks and the library's record.

Names follow its conventions: base units, `_total` for counters, one name for all ranks with labels
to tell them apart. Source: OpenMetrics 1.0.0, "Text format" and "Metric naming".
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.plainfile import open_plain
from torchmuster.launcher.model.progress import RankSample

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MIB = 1 << 20
_MOST_READ = 4 << 20  # bytes of the record in one read
_MOST_VALUES = 200  # metric names of one script


@dataclass(slots=True)
class NewestTraining:
    """The newest values that the training library has written, read as the file grows.

    Attributes:
        values: The last value of every metric, by the script's name for it.
    """

    path: str
    step: int | None = None
    saved_step: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    _position: int = 0

    def read(self) -> None:
        """Read what has been written since the last call; if that is much, only its end."""
        try:
            with open_plain(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._position:
                    self._position = 0  # the file was replaced
                file.seek(max(self._position, size - _MOST_READ))
                data = file.read(_MOST_READ)
                whole = data.rfind(b"\n") + 1
                self._position = file.tell() - len(data) + whole
        except OSError:
            return
        for line in data[:whole].splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        step, values = event.get("step"), event.get("values")
        if isinstance(step, int):
            self.step = step
        if event.get("event") == "saved" and isinstance(event.get("saved"), int):
            self.saved_step = event["saved"]
        if event.get("event") == "metrics" and isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, int | float) and (
                    name in self.values or len(self.values) < _MOST_VALUES
                ):
                    self.values[name] = float(value)


def render(
    run_id: str, num_attempts: int, sample: RankSample | None, training: NewestTraining
) -> str:
    """Return the whole answer to a scrape.

    Args:
        run_id: The run's id.
        num_attempts: How many attempts have been started.
        sample: The state of all ranks; None while no attempt runs.
        training: The training library's newest values.
    """
    lines = [
        *_family("torchmuster_run", "info", "The run that this head conducts."),
        f"torchmuster_run_info{_labels(run_id=run_id)} 1",
        *_family("torchmuster_attempts", "counter", "Attempts that were started."),
        f"torchmuster_attempts_total {num_attempts}",
    ]
    if sample is not None:
        lines += _of_ranks(sample)
    lines += _of_training(training)
    return "\n".join([*lines, "# EOF", ""])


def _of_ranks(sample: RankSample) -> Iterator[str]:
    up = [None if state == "?" else float(state != "") for state in sample.states]
    steps_s = _sum_of(sample, ("data_s", "forward_s", "rest_s"))
    waits = _ratio(sample.wait_s, steps_s)
    columns: tuple[tuple[str, str, Sequence[float | None]], ...] = (
        ("rank_up", "Whether the process of the rank is there.", up),
        ("rank_step", "Number of the last step, over all attempts.", sample.steps),
        ("rank_step_seconds", "Median of the newest steps.", sample.median_s),
        ("rank_steps_per_second", "Steps, as fast as they come now.", sample.steps_per_s),
        ("rank_wait_ratio", "Share of its steps that it waits for other ranks.", waits),
        ("rank_silence_seconds", "Since the library's last word.", sample.ages_s),
        ("rank_cpu_cores", "Processors in use.", sample.cpus),
        ("rank_resident_memory_bytes", "With what it has started.", _times(sample.rss_mib, _MIB)),
        ("rank_gpu_utilization_ratio", "Of its GPU.", _times(sample.gpu_percent, 0.01)),
        ("rank_gpu_memory_used_bytes", "On its GPU.", _times(sample.gpu_mib, _MIB)),
    )
    for name, means, values in columns:
        if any(value is not None for value in values):
            yield from _family(f"torchmuster_{name}", "gauge", means)
            for rank, (node, value) in enumerate(zip(sample.nodes, values, strict=True)):
                if value is not None:
                    yield f"torchmuster_{name}{_labels(rank=str(rank), node=node)} {_number(value)}"


def _of_training(training: NewestTraining) -> Iterator[str]:
    steps = (
        (
            "training_step",
            "Number of the last step that the library has written of.",
            training.step,
        ),
        ("snapshot_step", "Step of the newest whole snapshot.", training.saved_step),
    )
    for name, means, step in steps:
        if step is not None:
            yield from _family(f"torchmuster_{name}", "gauge", means)
            yield f"torchmuster_{name} {step}"
    if training.values:
        yield from _family(
            "torchmuster_training",
            "gauge",
            "The script's own metrics: means over ranks and samples.",
        )
        for name, value in training.values.items():
            yield f"torchmuster_training{_labels(name=name)} {_number(value)}"


def _family(name: str, kind: str, means: str) -> tuple[str, str]:
    return f"# TYPE {name} {kind}", f"# HELP {name} {means}"


def _labels(**labels: str) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items()) + "}"


def _number(value: float) -> str:
    """Return a number as Prometheus reads it, which knows `NaN` and `+Inf`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _sum_of(sample: RankSample, names: Iterable[str]) -> list[float | None]:
    columns = [getattr(sample, name) for name in names]
    if not all(columns):
        return [None] * len(sample.nodes)
    return [None if None in row else sum(row) for row in zip(*columns, strict=True)]


def _ratio(parts: Sequence[float | None], wholes: Sequence[float | None]) -> list[float | None]:
    given = parts or [None] * len(wholes)
    return [
        part / whole if part is not None and whole else None
        for part, whole in zip(given, wholes, strict=True)
    ]


def _times(values: Sequence[float | None], factor: float) -> list[float | None]:
    return [value * factor if value is not None else None for value in values]
