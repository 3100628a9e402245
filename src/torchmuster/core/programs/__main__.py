"""Entry point of every program on a node: `python [-I -S] .../programs/__main__.py NAME ARGUMENTS`.

It is started by its path, so that no environment variable and no `site` can disturb it, and neither
the node nor the job's environment needs an installation. `proc.node_program` makes the command
line.
"""

import os
import sys


def run(words: list[str]) -> int | None:
    """Run the program named by the first word with the other words; return its exit code."""
    from torchmuster.core import plugs  # sys.path is set below

    # Import only the requested program's module: some programs are about to become a task's
    # command.
    main = plugs.find("programs", words[0]) if words else None
    if main is None:
        # Its caller has other files: e.g. muster was upgraded while a run or a queued job needed
        # it.
        asked = words[0] if words else ""
        sys.stderr.write(
            f"error: muster has no program `{asked}`\nat: {os.path.abspath(__file__)}\n"
            "because: what starts it is of another version of muster\n"
            "hint: start the run or submit the job again\n"
        )
        return 2

    try:
        code: int | None = main(words[1:])
    except Exception as error:
        code = report(error)
        if code is None:
            raise
    return code


def report(error: Exception) -> int | None:
    """Print an error of muster and return its exit code; None for any other error."""
    from torchmuster.core.model.text import render_report, report_of_error
    from torchmuster.errors import ManyErrors, MusterError

    errors = error.errors if isinstance(error, ManyErrors) else [error]
    found = [one for one in errors if isinstance(one, MusterError)]
    sys.stderr.write("\n".join(render_report(report_of_error(one)) for one in found))
    return found[0].exit_code if found else None


if __name__ == "__main__":
    _here = os.path.dirname(os.path.abspath(__file__))
    if os.path.abspath(sys.path[0]) == _here:
        del sys.path[0]  # without -I the interpreter puts this folder first
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(_here))))
    sys.exit(run(sys.argv[1:]))
