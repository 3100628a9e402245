"""`muster run --inline`: rank 0 of 1 in this very process, for a debugger and for tests."""

import os
import runpy
import sys
import traceback
import types
from dataclasses import fields
from typing import TYPE_CHECKING

from torchmuster.core.cli.place import JOB_OPTIONS
from torchmuster.core.node.options import world_of_one
from torchmuster.core.node.spawner.mainmodule import first_path
from torchmuster.core.spec.launch import check_script
from torchmuster.core.spec.problems import Problems, parse_set_env

if TYPE_CHECKING:
    from torchmuster.core.spec.launch import RunRequest

# What is the same in one process without an agent, and what a terminal decides by itself.
_MEANT = frozenset(
    {
        *("script", "args", "module", "set_env", "cwd", "preflight", "tee", "stdin_rank", "name"),
        *("max_restarts", "inline"),
    }
)
_OPTIONS = {"engine": "--on", **JOB_OPTIONS}  # those that are called otherwise than their field


def run_inline(request: "RunRequest") -> int:
    """Run the script as `__main__` of this process; return its exit code.

    There is no agent, no attempt and no record, so breakpoints, profilers and coverage see the
    script as they see any program. Torch and `torchmuster.train` find a world of one.

    Raises:
        ManyErrors: Options that need more than one process, or a script that can't be run.
    """
    problems = Problems()
    for one in fields(request):
        value = getattr(request, one.name)
        is_one = one.name in ("nodes", "nproc_per_node") and value == "1"
        if one.name not in _MEANT and not is_one and value != one.default and value:
            option = _OPTIONS.get(one.name, f"--{one.name.replace('_', '-')}")
            what = "this process runs the script itself, as rank 0 of 1"
            problems.add(what, option, fix="without it, or without --inline")
    variables = parse_set_env(request.set_env, problems)
    if not request.module:
        check_script(request.script, request.cwd, problems, request.args)
    problems.checked(True)
    os.environ.update(world_of_one() | variables)
    kind = "module" if request.module else "file"
    sys.argv = [request.script, *request.args]
    if (folder := first_path(kind, request.script)) is not None:
        sys.path[0] = folder
    if request.module:
        runpy.run_module(request.script, run_name="__main__", alter_sys=True)
        return 0
    sys.excepthook = _show_from_script  # a debugger around this process sees the error itself
    try:
        runpy.run_path(request.script, run_name="__main__")
    except EOFError as error:  # click would take it for Ctrl-D
        _show_from_script(type(error), error, error.__traceback__)
        return 1
    return 0


def _show_from_script(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Print an exception from the script's own first frame on."""
    frames, path = trace, os.path.realpath(sys.argv[0])
    while frames is not None and os.path.realpath(frames.tb_frame.f_code.co_filename) != path:
        frames = frames.tb_next
    traceback.print_exception(kind, error, frames or trace)
