"""Measure muster against torchrun at its best settings, both in turn on this machine.

    python benchmarks/launch.py [--repeats 5] [--only start,restart,memory,steady,help]
                                [--side muster,torchrun,torchrun-fork] [--json FILE]

Every round measures every side once, and the next round begins with another side, so that noise
of a shared machine falls on all of them. A job that doesn't do what is measured is counted as
lost. Needs Linux and torch on the CPU; all processes and files of a run are gone at its end.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from launching import processes, report
from launching.cases import CASES, IMPORT_TORCH, Trial, measure_python, measure_start
from launching.job import LostError
from launching.sides import SIDES, Shape, Side

RESULTS = Path(__file__).with_name("results") / "launch.json"


def main() -> None:
    """Measure, print the tables and write the file."""
    parser = _parser()
    options = parser.parse_args()
    sides = [SIDES[name] for name in options.side]
    signal.signal(signal.SIGTERM, _leave)
    processes.adopt_orphans()
    machine = report.machine_facts()
    try:
        warm_up(sides)
        samples = measure_all(options.only, sides, num_rounds=options.repeats)
    except LostError as lost:
        parser.error(f"{lost}; leave a side that doesn't run here out with --side")
    finally:
        processes.kill_descendants()
    summaries = report.summarize([*samples, *report.beyond_floor(samples)])
    report.write_json(options.json, machine, samples, summaries)
    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    print(f"{facts}; median (lowest..highest) of {options.repeats} rounds\n")
    print(report.tables(summaries, options.side))


def warm_up(sides: Sequence[Side]) -> None:
    """Fill the page cache and write bytecode; raise LostError when a side doesn't run here."""
    measure_python(IMPORT_TORCH)
    for side in sides:
        try:
            measure_start(side, Shape(num_workers_per_node=1, restarts=False))
        except LostError as lost:
            raise LostError(f"{side.name}: {lost}") from lost


def measure_all(
    case_names: Sequence[str], sides: Sequence[Side], *, num_rounds: int
) -> list[report.Sample]:
    """Return the samples of all rounds, each of which begins with another side."""
    samples: list[report.Sample] = []
    for round_index in range(num_rounds):
        first = round_index % len(sides)
        in_turn = [*sides[first:], *sides[:first]]
        for name in case_names:
            for trial in CASES[name].trials(in_turn):
                samples += run_trial(trial, round_index)
    return samples


def run_trial(trial: Trial, round_index: int) -> list[report.Sample]:
    """Return the samples of one trial, and tell stderr about them."""
    values: Sequence[float | None]
    try:
        values, reason = trial.measure(), ""
    except LostError as lost:
        values, reason = [None] * len(trial.metrics), str(lost)
    samples = [
        report.Sample(metric=metric, side=trial.side, round=round_index, value=value, lost=reason)
        for metric, value in zip(trial.metrics, values, strict=True)
    ]
    for sample in samples:
        figure = "lost" if sample.value is None else f"{sample.value:.3f} {sample.metric.unit}"
        claim = f"{sample.metric.case}, {sample.metric.name}, {sample.side}"
        print(f"round {round_index + 1}: {claim}: {figure} {reason}".rstrip(), file=sys.stderr)
    return samples


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure muster against torchrun at its best settings."
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds, 5 if not given")
    parser.add_argument(
        "--only", type=_names_of(CASES), default=list(CASES), help=f"of {','.join(CASES)}"
    )
    parser.add_argument(
        "--side", type=_names_of(SIDES), default=list(SIDES), help=f"of {','.join(SIDES)}"
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    return parser


def _names_of(table: Mapping[str, object]) -> Callable[[str], list[str]]:
    """Return a reader of comma-separated names that are all in `table`."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in table]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
        return names

    return read


def _leave(signum: int, _frame: FrameType | None) -> None:
    """Turn a signal into an exception, so that everything is cleaned up."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    main()
