"""Destinations of metrics on rank 0: the run's record, TensorBoard, Weights & Biases, MLflow."""

import contextlib
import importlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from torchmuster.core.files.layout import RunDir, last_bytes, short_id
from torchmuster.core.model import contract
from torchmuster.core.model.text import span
from torchmuster.errors import UsageError


class MetricSink(Protocol):
    """A destination of metrics; gets means over all ranks."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of the steps up to `step`."""

    def close(self) -> None:
        """Flush and close."""


class MetricsRecord:
    """`training.jsonl`: one line per event, UTC, append only; `muster status` reads it.

    A full disk must not end a training run because of a line of metrics: lines are dropped, and the
    next
    written line has their number.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._num_dropped = 0

    def event(self, name: str, **fields: Any) -> None:
        """Append an event."""
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": stamp, "event": name, **fields}
        if self._num_dropped:
            line["dropped_before"] = self._num_dropped
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
            self._num_dropped = 0
        except OSError:
            self._num_dropped += 1

    def last_saved(self, folder: str) -> int | None:
        """Return the step of the run's newest recorded snapshot in this folder, if any."""
        saved = None
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            for line in file:
                if b'"saved"' in line:
                    saved = _saved_step(line, folder) or saved
        return saved

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of a step."""
        self.event("metrics", step=step, values=dict(values))

    def close(self) -> None:
        """Do nothing: the file is not kept open."""


def _saved_step(line: bytes, folder: str) -> int | None:
    try:
        event = json.loads(line)
    except ValueError:  # the writing process was killed
        return None
    is_it = isinstance(event, dict) and event.get("event") == "saved"
    return event.get("saved") if is_it and event.get("folder") == folder else None


class TensorBoard:
    """Event files that `tensorboard --logdir FOLDER` shows; each sweep member has a subfolder."""

    def __init__(self, folder: str) -> None:
        if os.environ.get(contract.MEMBER_VARIABLE):
            folder = os.path.join(folder, _own_run_id())
        what = "TensorBoard files need the package tensorboard"
        tensorboard = _imported("torch.utils.tensorboard", what, "tensorboard")
        # Every rank makes its sinks, but only rank 0 writes: so a sink opens files with the first
        # value.
        self._open: Any = lambda: tensorboard.SummaryWriter(folder)
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write each value as a scalar."""
        if self._writer is None:
            self._writer = self._open()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; pass the arguments of `wandb.init`, or an existing run.

    All attempts of a muster run are one run there, unless you pass an `id`.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        self._run = run
        if _own_run_id():
            options = {"id": _own_run_id(), "resume": "allow", **options}
        if run is None:
            what = "logging to Weights & Biases needs the package wandb"
            wandb = _imported("wandb", what, "wandb")
            self._open: Any = lambda: wandb.init(**options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values; the first ones start the run."""
        if self._run is None:
            self._run = self._open()
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


class MLflow:
    """A run of MLflow; pass the arguments of `mlflow.start_run`, or an existing run."""

    def __init__(self, run: Any = None, **options: Any) -> None:
        what = "logging to MLflow needs the package mlflow"
        self._mlflow = _imported("mlflow", what, "mlflow, or the smaller mlflow-skinny")
        self._run, self._is_ours, self._options = run, run is None, options

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values; the first ones start the run."""
        if self._run is None:
            self._run = self._mlflow.start_run(**self._options)
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        """Finish the run if it was started here, even if the script has activated another one."""
        if self._run is None or not self._is_ours:
            return
        run_id, active = self._run.info.run_id, self._mlflow.active_run()
        if active is not None and active.info.run_id == run_id:
            self._mlflow.end_run()  # this also deactivates it
        else:
            self._mlflow.MlflowClient().set_terminated(run_id)


def _own_run_id() -> str:
    """Return the id of this process's muster run; empty without one."""
    return short_id(os.path.basename(os.environ.get(contract.RUN_DIR_VARIABLE, "")))


def _imported(module: str, what: str, package: str) -> Any:
    """Return a module that is optional.

    Raises:
        UsageError: It can't be imported, `what` says for what it is needed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(what, why=str(error), fix=f"pip install {package}") from error


def open_sinks(given: list[MetricSink] | None, tensorboard: str | None) -> list[MetricSink]:
    """Return the sinks of a run, with one for TensorBoard if a folder for its files is given."""
    return [*(given or []), *([TensorBoard(tensorboard)] if tensorboard else [])]


class StepsDone:
    """A bar on a terminal, a plain line every 10 s elsewhere.

    Args:
        stream: Where it is written.
        now: The clock.
        has_bar: False where something else shows the progress: two clocks are one too many.
    """

    PLAIN_EVERY_S = 10.0
    BAR_EVERY_S = 0.1

    def __init__(self, stream: Any, *, now: Any = time.monotonic, has_bar: bool = True) -> None:
        self._stream = stream
        self._now = now
        self._is_bar = has_bar and bool(getattr(stream, "isatty", lambda: False)())
        self._shown_at = now()
        self._began_at = now()
        self._began_step = 0
        self._open = False

    def begin(self, step: int) -> None:
        """Start measuring speed and remaining time."""
        self._began_at = self._shown_at = self._now()
        self._began_step = step

    def show(self, step: int, total: int | None, values: Mapping[str, float]) -> None:
        """Show the progress, not more often than a person can read."""
        now = self._now()
        every = self.BAR_EVERY_S if self._is_bar else self.PLAIN_EVERY_S
        if now - self._shown_at < every:
            return
        self._shown_at = now
        line = self.line(step, total, values)
        self._write(f"\r\x1b[K{line}" if self._is_bar else f"{line}\n")
        self._open = self._is_bar

    def line(self, step: int, total: int | None, values: Mapping[str, float]) -> str:
        """Return the line to show."""
        speed = (step - self._began_step) / max(self._now() - self._began_at, 1e-9)
        parts = [f"step {step}/{total}" if total else f"step {step}"]
        if self._is_bar and total:
            filled = min(20 * step // total, 20)
            parts.insert(0, "[" + "#" * filled + "." * (20 - filled) + "]")
        if step > self._began_step:
            parts.append(f"{speed:.1f} steps/s")
            if total and total > step:
                parts.append(f"{span((total - step) / speed, whole=True)} left")
        parts += [f"{name} {value:.4g}" for name, value in values.items()]
        return "  ".join(parts)

    def end(self) -> None:
        """Move the cursor to a new line."""
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal is no reason to end
            self._stream.write(text)
            self._stream.flush()


# The machines' numbers, which muster's head samples on all ranks, added to a sink of metrics.
#
# The names are those of MLflow's system metrics, `system/NAME_UNIT`. Source: MLflow, "System
# Metrics", the list of names.


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
        known = system_values(next(_newest_first(self._run_dir.samples), {}))
        events = _newest_first(self._run_dir.training)
        saved = next((e["saved"] for e in events if isinstance(e.get("saved"), int)), None)
        return {**known, **({"system/snapshot_step": float(saved)} if saved is not None else {})}


def system_values(sample: Mapping[str, Any]) -> dict[str, float]:
    """Return a sample over all ranks as metrics by name; leave out what no rank reports."""
    found = {}
    for column, name in _MEANS:
        if numbers := _numbers(sample.get(column)):
            mean = sum(numbers) / len(numbers)
            found[name] = mean * _MIB_TO_MB if name.endswith("megabytes") else mean
    speeds = _numbers(sample.get("steps_per_s"))
    if speeds:
        found["system/steps_per_second"] = min(speeds)
    spent = sum(sum(_numbers(sample.get(name))) for name in ("data_s", "forward_s", "rest_s"))
    if spent > 0:
        found["system/wait_ratio"] = sum(_numbers(sample.get("wait_s"))) / spent
    return found


def _numbers(column: object) -> Sequence[float]:
    values = column if isinstance(column, list) else []
    return [float(value) for value in values if isinstance(value, int | float)]


def _newest_first(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects in the last part of a record."""
    data = last_bytes(path, 1 << 16)
    if data and b"\n" not in data.rstrip(b"\n") and len(data) == 1 << 16:
        data = last_bytes(path, _MOST_BYTES)
    for line in reversed(data[: data.rfind(b"\n") + 1].splitlines()):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # half written
            continue
        if isinstance(found, dict):
            yield found
