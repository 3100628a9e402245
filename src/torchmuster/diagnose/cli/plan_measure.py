"""Measurements for `muster plan`, by ordinary runs.

The test job measures the network, the probe measures a script's step.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

import click

from torchmuster.core.files.layout import short_id
from torchmuster.diagnose.plan import step_probe, tiny_job
from torchmuster.diagnose.plan.fit import RingFit, fit_ring, read_timings
from torchmuster.diagnose.plan.scaling import (
    Arrival,
    Cluster,
    NetworkLink,
    Work,
    say_bytes,
    say_link,
)
from torchmuster.errors import MusterError, NotFoundError

_NUM_STEPS = 10
_STEPS_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured step of a script.

    Attributes:
        dtype: The type of its parameters, by torch's name.
        words: How it was measured.
    """

    work: Work
    num_params: float
    dtype: str
    words: str


def measure_script(engine: str | None, command: tuple[str, ...]) -> Measured:
    """Run a script on one worker for some steps and return the parts of a step.

    Raises:
        MusterError: The script ended before it made enough optimizer steps.
    """
    probe = [step_probe.__file__, str(_NUM_STEPS), str(_STEPS_LIMIT_S), *command]
    where = ["--on", engine] if engine is not None else ["--here"]
    log, run_id, code = _run([*where, "--nodes", "1", "--nproc-per-node", "1"], probe)
    lines = [line for line in log.splitlines() if line.startswith(step_probe.MARK)]
    if not lines and code:
        what = f"`{command[0]}` failed before its steps were measured"
        raise MusterError(what, where=f"muster logs {short_id(run_id)}", why=_last_words(log))
    if not lines:
        raise MusterError(
            f"`{command[0]}` made too few steps of an optimizer to be measured",
            where=f"muster logs {short_id(run_id)}",
            why=_last_words(log),
            fix=f"let it make {step_probe.WARM_STEPS + _NUM_STEPS} steps, or give --step-time",
        )
    return _read_measured(json.loads(lines[-1].removeprefix(step_probe.MARK)))


def _read_measured(found: dict[str, Any]) -> Measured:
    gradients = [
        Arrival(size_bytes=float(size), ready_s=float(ready_s))
        for size, ready_s in found["gradients"]
    ]
    work = Work(
        gradient_bytes=sum(one.size_bytes for one in gradients),
        forward_s=found["forward_s"],
        backward_s=found["backward_s"],
        optimizer_s=found["optimizer_s"],
        arrivals=tuple(gradients),
        spread=found["spread"],
    )
    words = f"{found['steps']} steps measured on {found['device']}"
    return Measured(work=work, num_params=found["parameters"], dtype=found["dtype"], words=words)


def measure_network(engine: str, num_nodes: int, per_node: int) -> tuple[Cluster, list[str]]:
    """Run the test job and return the cluster that it measured, with a description.

    Raises:
        MusterError: The job failed, or a sum was wrong.
    """
    size = ["--on", engine, "--nodes", str(num_nodes), "--nproc-per-node", str(per_node)]
    log, run_id, code = _run(size, [tiny_job.__file__])
    lines = [line for line in log.splitlines() if line.startswith('{"backend"')]
    if not lines:
        why = _last_words(log)
        raise MusterError("the test job failed", where=f"muster logs {short_id(run_id)}", why=why)
    found = json.loads(lines[-1])
    if code or not found["right"]:
        wrong = [str(one["bytes"]) for one in found["between"] if not one["right"]]
        why = f"wrong sums of {', '.join(wrong) or '?'} bytes by {found['backend']}"
        raise MusterError(
            "the nodes do not sum right", where=f"muster logs {short_id(run_id)}", why=why
        )
    return read_cluster(found)


def read_cluster(found: dict[str, Any]) -> tuple[Cluster, list[str]]:
    """Return the cluster that a test job measured, with a description.

    All nodes are expected to have the same number of workers.
    """
    per_node, backend = found["nodes"][0], found["backend"]
    between = fit_ring(read_timings(found["between"]), found["world_size"])
    words = [_say_fit(f"all {found['world_size']} workers", backend, between)]
    inside = None
    if found["inside"]:
        fit = fit_ring(read_timings(found["inside"]), per_node)
        words.append(_say_fit(f"{per_node} workers of a node", backend, fit))
        inside = NetworkLink(latency_s=fit.latency_s, bytes_per_s=fit.bytes_per_s)
    cluster = Cluster(
        per_node=per_node,
        between=NetworkLink(latency_s=between.latency_s, bytes_per_s=between.bytes_per_s),
        inside=inside,
        is_flat=True,  # the measured sum is over all workers: it includes both levels
        cpu_s_per_byte=between.cpu_s_per_byte if backend == "gloo" else 0.0,
    )
    return cluster, words


def _say_fit(who: str, backend: str, fit: RingFit) -> str:
    link = say_link(NetworkLink(latency_s=fit.latency_s, bytes_per_s=fit.bytes_per_s))
    text = f"{who}: {link}; measured with {backend}, R² {fit.r_squared:.4f}"
    if not fit.sags:
        return text
    busbw = say_bytes(fit.busbw_bytes_per_s)
    return f"{text}; the largest sum is slower ({busbw}/s): look for loss, the MTU or incast"


def _run(size: list[str], program: list[str]) -> tuple[str, str, int]:
    """Call `muster run`; return rank 0's output, the run id and the exit code."""
    from torchmuster.core.cli.run import run
    from torchmuster.core.owner.create import new_run_id
    from torchmuster.launcher.views.control import LogChoice, log_files
    from torchmuster.launcher.views.find import find_run

    run_id = new_run_id("plan")
    click.echo(f"muster: measuring with {os.path.basename(program[0])}, run {run_id}", err=True)
    words = [*size, "--max-restarts", "0", "--tee", "none", "--run-id", run_id, *program]
    code = run.main(args=words, prog_name="muster run", standalone_mode=False)
    try:
        ((_, path),) = log_files(find_run(run_id), LogChoice(rank=0))
        with open(path, errors="replace") as file:
            return file.read(), run_id, int(code or 0)
    except (NotFoundError, OSError):  # rank 0 wrote nothing, or never started
        return "", run_id, int(code or 0)


def _last_words(log: str) -> str | None:
    lines = [line for line in log.splitlines() if line.strip()]
    return "\n".join(lines[-3:]) or None
