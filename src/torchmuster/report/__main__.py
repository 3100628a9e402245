"""`python -m torchmuster.report RUN_DIR`: makes the page of a run that took too long for the end of its client."""

import os
import signal
import sys

from torchmuster.core.files.layout import RunDir
from torchmuster.report.at_end import make_page

_LIMIT_S = 300  # of a disk that hangs: nobody waits for this process, so nobody would end it


def main(folder: str) -> int:
    """Make the page; the exit code says whether it was possible."""
    signal.alarm(_LIMIT_S)
    os.nice(10)
    return 0 if make_page(RunDir(folder)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
