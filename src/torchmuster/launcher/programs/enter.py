"""Start a command on another node as its job's head would: with the head's variables, in the head's folder.

pbsdsh brings nothing of it, ssh neither. This process becomes the command.
"""

import os
from dataclasses import dataclass
from typing import NoReturn

from torchmuster.core import proc
from torchmuster.core.model.codec import from_words, to_words
from torchmuster.core.node.environment import take_environment
from torchmuster.errors import MusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterOrder:
    """The command line of `enter`; `variable` is NAME=VALUE, `environment` is a file."""

    environment: str
    cwd: str
    variable: tuple[str, ...] = ()
    command: tuple[str, ...]


def enter_argv(python: str, order: EnterOrder) -> list[str]:
    """Return the command line that starts the command there; the first word is `python`, an absolute path."""
    return proc.node_program("enter", *to_words(order), python=python)


def main(arguments: list[str]) -> NoReturn:
    """Become the command; return only when that is not possible."""
    order = from_words(EnterOrder, arguments)
    take_environment(order.environment)
    os.environ |= dict(word.split("=", 1) for word in order.variable)
    try:
        os.chdir(order.cwd)
        os.execvp(order.command[0], order.command)
    except OSError as error:
        what = f"`{order.command[0]}` can't be started in {order.cwd} on {os.uname().nodename}"
        fix = "both have to be on a file system of all nodes"
        raise MusterError(what, why=str(error), fix=fix) from error
