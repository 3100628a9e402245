"""Entry point of `muster` and `python -m torchmuster`: Ctrl-C ends it without a traceback."""

import os
from typing import NoReturn


def main() -> NoReturn:
    """Run the command; exit with its code, or with 130 after Ctrl-C."""
    try:
        from torchmuster.core.cli.main import main as run_command  # most of a quick command's time

        run_command()
    except KeyboardInterrupt:
        os._exit(130)  # the end of the interpreter could be interrupted again


if __name__ == "__main__":
    main()
