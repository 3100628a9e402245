"""Become a command that dies with its parent: `dies_with_parent COMMAND...`.

A client that is killed must not leave kubectl running.
"""

import os

from torchmuster.core import proc


def main(arguments: list[str]) -> int:
    """Become the command; the kernel keeps the parent-death signal across `exec`."""
    proc.die_with_parent(os.getppid())
    os.execvp(arguments[0], arguments)
