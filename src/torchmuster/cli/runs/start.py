"""What every start of a run checks, wherever it goes: its id, and a debugger that can be reached."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmuster.spec.launch import RunRequest
    from torchmuster.spec.problems import Problems


def choose_id(request: "RunRequest", problems: "Problems") -> str:
    """Return the id of the run; a problem is noted."""
    from torchmuster.errors import UsageError
    from torchmuster.owner.create import choose_run_id

    try:
        return choose_run_id(request.script, request.run_id, request.name)
    except UsageError as error:
        problems.found.append(error)
        return ""


def check_debugger(request: "RunRequest", problems: "Problems") -> None:
    """Refuse a debugger that could not be reached from here."""
    for option in ("debugpy", "pdb"):
        value = getattr(request, option)
        if value is None or value is False:
            continue
        if request.detach:
            why = "its connection goes through the command that follows the run"
            problems.add(
                f"--{option} can't be combined with --detach", "--detach", why, "leave it out"
            )
        for other in ("--debugpy", "--stdin") if option == "pdb" else ():
            if getattr(request, "stdin_rank" if other == "--stdin" else "debugpy") is not None:
                what = f"--pdb can't be combined with {other}"
                problems.add(what, other, fix="leave one of them out")
    if request.pdb and not request.detach and not (_is_terminal(0) and _is_terminal(1)):
        why = "standard input or output of this command is no terminal"
        fix = "muster run --debugpy, for an editor; `muster logs RUN` has the traceback"
        problems.add("--pdb needs a terminal", "--pdb", why, fix)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
