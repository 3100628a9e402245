"""Destinations of metrics on rank 0: the run's record, TensorBoard, Weights & Biases, MLflow."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from torchmuster.core.files.layout import short_id
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
        try:
            with open(self.path, "rb") as file:
                for line in file:
                    if b'"saved"' in line:
                        saved = _saved_step(line, folder) or saved
        except OSError:
            pass
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
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _needs(
                "TensorBoard files need the package tensorboard", "tensorboard", error
            ) from error
        # Every rank makes its sinks, but only rank 0 writes: so a sink opens files with the first
        # value.
        self._open: Any = lambda: SummaryWriter(folder)
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
            try:
                import wandb
            except ImportError as error:
                raise _needs(
                    "logging to Weights & Biases needs the package wandb", "wandb", error
                ) from error
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
        try:
            import mlflow
        except ImportError as error:
            raise _needs(
                "logging to MLflow needs the package mlflow",
                "mlflow, or the smaller mlflow-skinny",
                error,
            ) from error
        self._mlflow: Any = mlflow
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


def _needs(what: str, package: str, error: ImportError) -> UsageError:
    return UsageError(what, why=str(error), fix=f"pip install {package}")


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

    def show(
        self, step: int, total: int | None, values: Mapping[str, float], *, force: bool = False
    ) -> None:
        """Show the progress, not more often than a person can read."""
        now = self._now()
        every = self.BAR_EVERY_S if self._is_bar else self.PLAIN_EVERY_S
        if not force and now - self._shown_at < every:
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
