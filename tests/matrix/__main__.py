"""Finds what tests and benchmarks share, and runs the command: `python tests/matrix --help`."""

import importlib
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[0] = str(REPOSITORY / "tests")
sys.path.append(str(REPOSITORY / "benchmarks"))
importlib.import_module("matrix.command").main()
