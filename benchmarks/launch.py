"""Measure muster against torchrun at its best settings, both in turn on this machine.

    python benchmarks/launch.py [--repeats 3] [--only start,restart,memory,steady,help] [--quick]
                                [--side muster,torchrun,torchrun-fork] [--torchrun PATH]
                                [--json FILE] [--limit SECONDS]

Every round measures every side once, and the next round begins with another side, so that noise
of a shared machine falls on all of them. A job that doesn't do what is measured is counted as
lost, and the table says why. Needs Linux and torch on the CPU; all processes and files of a run are
gone at its end.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launching import processes, report
from launching.cases import FULL, QUICK, Case, Trial, all_cases
from launching.job import LostError
from launching.sides import SIDES, Side, sides_of
from running.results import FOLDER, headline, machine_facts, save
from running.stage import Stage, stage


def main() -> None:
    """Measure, print the tables and write the file."""
    options = _parser().parse_args()
    machine = machine_facts()
    cases = {
        name: case
        for name, case in all_cases(QUICK if options.quick else FULL).items()
        if name in options.only
    }
    repeats = 1 if options.quick else options.repeats
    processes.adopt_orphans()
    with stage("launch", options.limit) as running:
        sides = [SIDES[name] for name in options.side]
        sides += [side for path in options.torchrun for side in sides_of(path)]
        try:
            samples = measure_all(running, cases, sides, num_rounds=repeats)
        finally:
            processes.kill_descendants()
    summaries = report.summarize([*samples, *report.beyond_floor(samples)])
    how = f"median (lowest..highest) of {repeats} rounds, of 1 where one figure stands alone"
    tables = report.tables(cases, summaries, [side.name for side in sides], samples)
    document = report.document(machine, samples, summaries)
    save(options.json, document, f"{headline(machine, how)}\n\n{tables}")
    if not any(sample.value is not None for sample in samples):
        sys.exit("launch: nothing could be measured")


def measure_all(
    running: Stage, cases: Mapping[str, Case], sides: Sequence[Side], *, num_rounds: int
) -> list[report.Sample]:
    """Return the samples of all rounds, each of which begins with another side."""
    samples: list[report.Sample] = []
    for round_index in range(num_rounds):
        first = round_index % len(sides)
        in_turn = [*sides[first:], *sides[:first]]
        for name, case in cases.items():
            if case.max_rounds is not None and round_index >= case.max_rounds:
                continue
            for trial in case.trials(in_turn):
                running.step(f"round {round_index + 1} of {num_rounds}: {name}, {trial.side}")
                samples += run_trial(running, trial, round_index)
    return samples


def run_trial(running: Stage, trial: Trial, round_index: int) -> list[report.Sample]:
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
        running.tell(f"  {sample.metric.name}, {sample.side}: {figure} {reason}".rstrip())
    return samples


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure muster against torchrun at its best settings."
    )
    names = all_cases(FULL)
    parser.add_argument("--repeats", type=int, default=3, help="rounds, 3 if not given")
    parser.add_argument(
        "--only", type=_names_of(names), default=list(names), help=f"of {','.join(names)}"
    )
    parser.add_argument(
        "--side", type=_names_of(SIDES), default=list(SIDES), help=f"of {','.join(SIDES)}"
    )
    parser.add_argument(
        "--torchrun",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="another environment's torchrun, measured beside",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round, small: shows that everything works"
    )
    parser.add_argument("--json", type=Path, default=FOLDER / "launch.json")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for all of it")
    return parser


def _names_of(table: Mapping[str, object]) -> Callable[[str], list[str]]:
    """Return a reader of comma-separated names that are all in `table`."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in table]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
        return names

    return read


if __name__ == "__main__":
    main()
