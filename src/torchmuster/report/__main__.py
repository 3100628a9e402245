"""`python -m torchmuster.report RUN_DIR`: make the page of a run after its client has ended."""

import os
import signal
import sys

from torchmuster.core.files.layout import RunDir
from torchmuster.report.at_end import make_page

_LIMIT_S = 300  # ends the process if a disk hangs, because nobody waits for it


def main(folder: str) -> int:
    """Make the page; return the exit code."""
    signal.alarm(_LIMIT_S)
    os.nice(10)
    return 0 if make_page(RunDir(folder)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
