"""The door of every program that muster starts on a node: `python [-I -S] .../programs/__main__.py NAME ARGUMENTS`.

Started by its path, so that no environment variable and no `site` can disturb it, and neither the node nor the job's
environment needs an installation. `proc.node_program` makes the command line.
"""

import os
import sys

# Only the module of the program that is asked for is imported: some are about to become a task's command.
PROGRAMS = {
    "agent": "programs.main",
    "group": "programs.group_main",
    "task": "programs.task_main",
    "enter": "programs.enter",
    "view": "node.sandbox.place_launch",
    "container": "node.sandbox.container",
    "exec": "node.sandbox.exec_launch",
    "network": "node.sandbox.network_hold",
    "stage": "programs.staging",
    "unpack": "node.shipping.unpack",
    "remote": "node.remote.main",
    "proxy": "node.remote.proxy",
    "pod": "node.pod.serve",
    "call": "node.pod.call",
    "leashed": "programs.leashed",
    "debugger": "programs.debugger",
    "pod-warm": "node.pod.warm",
    "task-muster": "programs.task_muster",
    "pod-record": "node.pod.record",
    "pod-keep": "node.pod.keep",
    "pod-place": "node.pod.place",
    "pod-task": "node.pod.task",
    "conduct-pods": "owner.firstpod.conduct",
    "conduct-group-pods": "owner.firstpod.conduct_group",
    "conduct": "owner.jobs.conduct",
    "succeed": "owner.jobs.succeed",
    "node-lost": "owner.jobs.node_lost",
    "conduct-group": "owner.jobs.conduct_group",
    "conduct-member": "owner.sweep.conduct",
    "training-task": "owner.jobs.nested",
}


def run(words: list[str]) -> int | None:
    """Run the program that the first word names, with the others; return its exit code."""
    module = PROGRAMS.get(words[0]) if words else None
    if module is None:
        # Its starter read other files than these: e.g. muster was upgraded while a run or a queued job needed it.
        asked = words[0] if words else ""
        sys.stderr.write(
            f"error: muster has no program `{asked}`\nat: {os.path.abspath(__file__)}\n"
            "because: what starts it is of another version of muster\n"
            "hint: start the run or submit the job again\n"
        )
        return 2

    main = __import__(f"torchmuster.{module}", fromlist=["main"]).main
    try:
        code: int | None = main(words[1:])
    except Exception as error:
        code = report(error)
        if code is None:
            raise
    return code


def report(error: Exception) -> int | None:
    """Print an error that tells the user what is wrong, and return its exit code; None for any other."""
    from torchmuster.errors import ManyErrors, MusterError
    from torchmuster.model.display.text import render_report, report_of_error

    errors = error.errors if isinstance(error, ManyErrors) else [error]
    found = [one for one in errors if isinstance(one, MusterError)]
    sys.stderr.write("\n".join(render_report(report_of_error(one)) for one in found))
    return found[0].exit_code if found else None


if __name__ == "__main__":
    _here = os.path.dirname(os.path.abspath(__file__))
    if os.path.abspath(sys.path[0]) == _here:
        del sys.path[0]  # the interpreter put this folder in front, without -I
    sys.path.insert(0, os.path.dirname(os.path.dirname(_here)))
    sys.exit(run(sys.argv[1:]))
