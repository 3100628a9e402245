"""The same twelve faults on every engine: made, judged and written down.

    python tests/matrix [--engine local,ssh,slurm,pbs,kubernetes] [--fault sigkill,cancel,...] [--show]

Writes docs/matrix.json and docs/matrix.md: the columns of the engines that were asked for. With
`--fault` nothing is written. Needs root on Linux; the world of each engine is in namespaces and one temporary folder.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from matrix import page
from matrix.faults import FAULTS
from matrix.judge import judge
from matrix.worlds import WORLDS
from running.results import machine_facts
from running.stage import stage

LIMIT_S = 3600.0
SHOWN_LINES = 40


def main():
    options = _parser().parse_args()
    faults = [fault for fault in FAULTS if options.fault is None or fault.name in options.fault]
    document = page.read()
    with (
        stage("matrix", LIMIT_S) as running,
        tempfile.TemporaryDirectory(prefix="muster-matrix-", dir="/var/tmp") as folder,
    ):
        tempfile.tempdir = folder  # not in /tmp, of which every node has one of its own
        for name in options.engine:
            facts = machine_facts()
            world = WORLDS[name](Path(folder) / name)
            if name in document and (reason := world.why_not()) is not None:
                running.tell(f"{name}: what was measured before stays: {reason}")
                continue
            cells = run_engine(world, faults, running, show=options.show)
            made = {"title": world.title, "made_of": world.made_of}
            document[name] = {"machine": facts, **made, "cells": cells}
    print(page.table(document))
    if options.fault is None:
        page.write(document)
    words = [
        document[name]["cells"][fault.name]["word"] for name in options.engine for fault in faults
    ]
    sys.exit("failed" in words)


def run_engine(world, faults, running, *, show):
    """Return the cells of an engine, by fault."""
    if (reason := world.why_not()) is not None:
        running.tell(f"{world.name}: not run: {reason}")
        return {fault.name: {"word": "not run", "why": reason} for fault in faults}
    cells = {}
    with world:
        for fault in faults:
            running.step(f"{world.name}: {fault.title}")
            cell = judge(world, fault)
            running.tell(f"{world.name}: {fault.title}: {page.words(cell.document())}")
            if cell.word == "failed" or show:
                running.tell(f"what was shown:\n{_end_of(cell.said)}")
            cells[fault.name] = cell.document()
    return cells


def _end_of(said):
    return "\n".join(line[:300] for line in said.splitlines()[-SHOWN_LINES:])


def _parser():
    parser = argparse.ArgumentParser(description=__doc__)
    engines, faults = list(WORLDS), [fault.name for fault in FAULTS]
    parser.add_argument("--engine", type=_names(engines), default=engines)
    parser.add_argument("--fault", type=_names(faults))
    parser.add_argument("--show", action="store_true", help="what the terminal showed, always")
    return parser


def _names(known):
    def names(text):
        asked = text.split(",")
        if wrong := [name for name in asked if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: not of {', '.join(known)}")
        return asked

    return names
