"""Finds what tests share, and runs the command: `python tests/pairs --help`."""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
sys.exit(importlib.import_module("pairs.command").main())
