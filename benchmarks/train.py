"""Measure the training library against hand-written code and peers at their best settings.

    python benchmarks/train.py [--repeats 1] [--only overhead,metrics,stall,every10,memory,verify,write]
                               [--quick] [--json FILE] [--limit SECONDS]

In each job all sides take turns, block by block, in the same processes, so that noise of a shared
machine falls on all of them. Goals are printed beside what was measured; nothing fails when one
is missed. Needs Linux, torch on the CPU, 4 GB of free memory and 4 GB of disk in the temporary
folder ($TMPDIR), which is the disk that is measured.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from launching import processes
from launching.cases import Metric
from launching.job import LostError
from launching.report import Sample, summarize
from running.results import FOLDER, headline, machine_facts, save
from running.stage import Stage, stage
from training import report
from training.cases import FULL, OURS, QUICK, Case, all_cases
from training.jobs import Values

PAIRS_PER_ROUND = 1000  # more than any job has: numbers of pairs don't meet


def main() -> None:
    """Measure, print the tables and write the file."""
    options = _parser().parse_args()
    processes.adopt_orphans()
    machine = machine_facts()
    known = all_cases(QUICK if options.quick else FULL)
    cases = {name: known[name] for name in options.only}
    repeats = 1 if options.quick else options.repeats
    samples: list[Sample] = []
    with stage("train", options.limit) as running:
        try:
            for round_index in range(repeats):
                samples += measure_round(running, cases, round_index)
        finally:
            processes.kill_descendants()
    summaries, verdicts = summarize(samples), report.judge(cases, samples)
    how = f"median (lowest..highest) of all blocks in {repeats} rounds"
    tables = report.tables(cases, summaries, verdicts, samples)
    document = report.document(machine, samples, summaries, verdicts)
    save(options.json, document, f"{headline(machine, how)}\n\n{tables}")
    if not any(sample.value is not None for sample in samples):
        sys.exit("train: nothing could be measured")


def measure_round(running: Stage, cases: Mapping[str, Case], round_index: int) -> list[Sample]:
    """Return the samples of one round, and tell stderr about them."""
    samples = []
    for case_name, case in cases.items():
        for row_name, measure in case.rows.items():
            running.step(f"round {round_index + 1}: {case_name}, {row_name}")
            samples += measure_row(running, case_name, row_name, measure, round_index)
    return samples


def measure_row(
    running: Stage,
    case_name: str,
    row_name: str,
    measure: Callable[[], Values],
    round_index: int,
) -> list[Sample]:
    """Return the samples of one job; a lost one counts against the side that is ours."""
    try:
        values = measure()
    except LostError as lost:
        running.tell(f"  {row_name}: lost: {lost}")
        metric = Metric(case=case_name, name=row_name, unit="lost")
        return [Sample(metric=metric, side=OURS, round=round_index, value=None, lost=str(lost))]
    samples = []
    for name_and_unit, by_side in values.items():
        name, _, unit = name_and_unit.rpartition(", ")
        metric = Metric(case=case_name, name=name, unit=unit)
        for side, numbers in by_side.items():
            running.tell(f"  {name}, {side}: {_few(numbers)} {unit}")
            samples += [
                Sample(
                    metric=metric, side=side, round=round_index * PAIRS_PER_ROUND + i, value=number
                )
                for i, number in enumerate(numbers)
            ]
    return samples


def _few(numbers: list[float]) -> str:
    return " ".join(f"{number:.4g}" for number in numbers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure the training library.")
    names = list(all_cases(FULL))
    parser.add_argument("--repeats", type=int, default=1, help="rounds, 1 if not given")
    parser.add_argument("--only", type=_reader(names), default=names, help=f"of {','.join(names)}")
    parser.add_argument("--json", type=Path, default=FOLDER / "train.json")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for all of it")
    parser.add_argument(
        "--quick", action="store_true", help="few and short blocks: the figures mean little"
    )
    return parser


def _reader(known: list[str]) -> Callable[[str], list[str]]:
    """Return a reader of comma-separated names that are all known."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
        return names

    return read


if __name__ == "__main__":
    main()
