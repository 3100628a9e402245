"""Become a command on another node, with the variables and in the folder of the job's head.

Neither pbsdsh nor ssh passes them on.
"""

import os
from dataclasses import dataclass
from typing import NoReturn

from torchmuster.core import proc
from torchmuster.core.model.codec import from_arguments, to_arguments
from torchmuster.core.node.options import take_environment
from torchmuster.errors import MusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterOrder:
    """The arguments of the program `enter`; `variable` is NAME=VALUE, `environment` a file."""

    environment: str
    cwd: str
    variable: tuple[str, ...] = ()
    command: tuple[str, ...]


def enter_argv(python: str, order: EnterOrder) -> list[str]:
    """Return the command line to start the command there with `python`, an absolute path."""
    return proc.node_program("enter", *to_arguments(order), python=python)


def main(arguments: list[str]) -> NoReturn:
    """Become the command.

    Raises:
        MusterError: The command can't be started.
    """
    order = from_arguments(EnterOrder, arguments)
    take_environment(order.environment)
    os.environ |= dict(word.split("=", 1) for word in order.variable)
    try:
        os.chdir(order.cwd)
        os.execvp(order.command[0], order.command)
    except OSError as error:
        what = f"`{order.command[0]}` can't be started in {order.cwd} on {os.uname().nodename}"
        fix = "both have to be on a file system of all nodes"
        raise MusterError(what, why=str(error), fix=fix) from error
