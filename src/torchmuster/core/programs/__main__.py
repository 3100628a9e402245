"""The door of every program that muster starts on a node: `python [-I -S] .../programs/__main__.py NAME ARGUMENTS`.

Started by its path, so that no environment variable and no `site` can disturb it, and neither the node nor the job's
environment needs an installation. `proc.node_program` makes the command line.
"""

import os
import sys

# Only the module of the program that is asked for is imported: some are about to become a task's command.
PROGRAMS = {
    "agent": "core.programs.main",
    "group": "workflow.head.group_main",
    "task": "workflow.task.task_main",
    "enter": "launcher.programs.enter",
    "view": "workflow.sandbox.place_launch",
    "container": "workflow.sandbox.container",
    "exec": "workflow.sandbox.exec_launch",
    "network": "workflow.sandbox.network_hold",
    "stage": "workflow.task.staging",
    "unpack": "launcher.node.shipping.unpack",
    "remote": "launcher.node.remote.main",
    "proxy": "launcher.node.remote.proxy",
    "pod": "kubernetes.node.serve",
    "call": "kubernetes.node.call",
    "leashed": "launcher.programs.leashed",
    "debugger": "launcher.programs.debugger",
    "pod-warm": "kubernetes.node.warm",
    "task-muster": "workflow.task.task_muster",
    "pod-record": "kubernetes.node.record",
    "pod-keep": "kubernetes.node.keep",
    "pod-place": "kubernetes.node.place",
    "pod-task": "kubernetes.node.task",
    "conduct-pods": "kubernetes.firstpod.conduct",
    "conduct-group-pods": "kubernetes.firstpod.conduct_group",
    "conduct": "launcher.jobs.conduct",
    "succeed": "launcher.jobs.succeed",
    "node-lost": "launcher.jobs.node_lost",
    "conduct-group": "workflow.owner.conduct_group",
    "conduct-member": "multirun.sweep.conduct",
    "training-task": "workflow.owner.nested",
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
    from torchmuster.core.model.text import render_report, report_of_error
    from torchmuster.errors import ManyErrors, MusterError

    errors = error.errors if isinstance(error, ManyErrors) else [error]
    found = [one for one in errors if isinstance(one, MusterError)]
    sys.stderr.write("\n".join(render_report(report_of_error(one)) for one in found))
    return found[0].exit_code if found else None


if __name__ == "__main__":
    _here = os.path.dirname(os.path.abspath(__file__))
    if os.path.abspath(sys.path[0]) == _here:
        del sys.path[0]  # the interpreter put this folder in front, without -I
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(_here))))
    sys.exit(run(sys.argv[1:]))
