"""Start a command on another node as its job's head would: with the head's variables, in the head's folder.

    enter --environment FILE --cwd FOLDER [--set NAME=VALUE] -- COMMAND

pbsdsh brings nothing of it, ssh neither. This process becomes the command.
"""

import argparse
import os
import sys

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.model.display.text import render_report, report_of_error
from torchmuster.node.environment import take_environment


def enter_argv(
    python: str, environment: str, cwd: str, settings: dict[str, str], command: list[str]
) -> list[str]:
    """Return the command line that starts `command` there; the first word is `python`, an absolute path."""
    argv = proc.node_program("enter", f"--environment={environment}", f"--cwd={cwd}", python=python)
    argv += [f"--set={name}={value}" for name, value in settings.items()]
    return [*argv, "--", *command]


def main(arguments: list[str]) -> int:
    """Become the command; return only when that is not possible."""
    parser = argparse.ArgumentParser(prog="enter")
    parser.add_argument("--environment", required=True)
    parser.add_argument("--cwd", required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    try:
        take_environment(options.environment)
        os.environ |= dict(word.split("=", 1) for word in options.set)
        os.chdir(options.cwd)
        os.execvp(options.command[0], options.command)
    except MusterError as error:
        sys.stderr.write(render_report(report_of_error(error)))
        return error.exit_code
    except OSError as error:
        host = os.uname().nodename
        what = f"`{options.command[0]}` can't be started in {options.cwd} on {host}"
        found = MusterError(
            what, why=str(error), fix="both have to be on a file system of all nodes"
        )
        sys.stderr.write(render_report(report_of_error(found)))
        return 1
