"""Adds the machines' numbers, which muster's head samples on all ranks, to a sink of metrics.

The names are those of MLflow's system metrics, `system/NAME_UNIT`. Source: MLflow, "System
Metrics", the list of names.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torchmuster.core.files.layout import RunDir, last_bytes
from torchmuster.core.model import contract
from torchmuster.train.sinks import MetricSink

_MOST_BYTES = 4 << 20  # a line of 4,096 ranks has about half a MB
_MEANS = (
    ("cpus", "system/cpu_cores"),
    ("rss_mib", "system/memory_usage_megabytes"),
    ("gpu_percent", "system/gpu_utilization_percentage"),
    ("gpu_mib", "system/gpu_memory_usage_megabytes"),
)
_MIB_TO_MB = 1.048576


class SystemMetrics:
    """Gives a sink the script's metrics and also `system/...`: means over all ranks, newest sample.

    `sinks=[tm.SystemMetrics(tm.WeightsAndBiases(project="x"))]`. The head records a sample every
    ten seconds, less often in long runs; each sample is passed on once. Without muster, or if rank
    0 can't see the head's run directory, the sink gets only the script's metrics.

    Args:
        sink: The destination of everything.
        run_dir: The run directory; default: muster's.
    """

    def __init__(self, sink: MetricSink, run_dir: str | None = None) -> None:
        self._sink = sink
        folder = run_dir or os.environ.get(contract.RUN_DIR_VARIABLE)
        self._run_dir = RunDir(folder) if folder else None
        self._seen: tuple[int, int] | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values, together with new ones of the machines."""
        self._sink.write(step, {**values, **self._newest()})

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()

    def _newest(self) -> dict[str, float]:
        if self._run_dir is None:
            return {}
        try:
            found = os.stat(self._run_dir.samples)
        except OSError:
            return {}
        mark = (found.st_size, found.st_mtime_ns)
        if mark == self._seen:
            return {}
        self._seen = mark
        known = system_values(_last_object(self._run_dir.samples))
        saved = _last_saved(self._run_dir.training)
        return {**known, **({"system/snapshot_step": float(saved)} if saved is not None else {})}


def system_values(sample: Mapping[str, Any]) -> dict[str, float]:
    """Return a sample over all ranks as metrics by name; leave out what no rank reports."""
    found = {}
    for column, name in _MEANS:
        if (mean := _mean(sample.get(column))) is not None:
            found[name] = mean * _MIB_TO_MB if name.endswith("megabytes") else mean
    speeds = _numbers(sample.get("steps_per_s"))
    if speeds:
        found["system/steps_per_second"] = min(speeds)
    spent = sum(sum(_numbers(sample.get(name))) for name in ("data_s", "forward_s", "rest_s"))
    if spent > 0:
        found["system/wait_ratio"] = sum(_numbers(sample.get("wait_s"))) / spent
    return found


def _mean(column: object) -> float | None:
    numbers = _numbers(column)
    return sum(numbers) / len(numbers) if numbers else None


def _numbers(column: object) -> Sequence[float]:
    values = column if isinstance(column, list) else []
    return [float(value) for value in values if isinstance(value, int | float)]


def _last_object(path: str) -> Mapping[str, Any]:
    for line in reversed(_lines(path)):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # half written
            continue
        if isinstance(found, dict):
            return found
    return {}


def _last_saved(path: str) -> int | None:
    """Return the step of the newest complete snapshot in the last part of the record."""
    for line in reversed(_lines(path)):
        if b'"saved"' not in line:
            continue
        try:
            saved = json.loads(line).get("saved")
        except (ValueError, RecursionError, AttributeError):
            continue
        if isinstance(saved, int):
            return saved
    return None


def _lines(path: str) -> list[bytes]:
    data = last_bytes(path, 1 << 16)
    if data and b"\n" not in data.rstrip(b"\n") and len(data) == 1 << 16:
        data = last_bytes(path, _MOST_BYTES)
    return data[: data.rfind(b"\n") + 1].splitlines()
