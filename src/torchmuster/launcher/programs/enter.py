"""Become a command: on another node, or one that dies with its parent."""

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
    """Become a command with the variables and in the folder of the job's head.

    Neither pbsdsh nor ssh passes them on.

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


def die_with_parent(arguments: list[str]) -> NoReturn:
    """Become a command that dies with its parent: a killed client must not leave kubectl running.

    The kernel keeps the parent-death signal across `exec`.
    """
    proc.die_with_parent(os.getppid())
    os.execvp(arguments[0], arguments)
