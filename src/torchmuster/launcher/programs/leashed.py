"""Becomes another command that dies with us: `leashed COMMAND...`; a client that is killed must not leave kubectl behind."""

import os

from torchmuster.core import proc


def main(arguments: list[str]) -> int:
    """Become the command; the kernel's promise to end it with its parent stays across `exec`."""
    proc.die_with_parent(os.getppid())
    os.execvp(arguments[0], arguments)
