"""`--detach`: a background owner replaces the client."""

import os
import sys
from collections.abc import Callable

from torchmuster.core import plugs, proc
from torchmuster.core.files.layout import Kind, RunDir
from torchmuster.core.node.kernel import visible_gpus
from torchmuster.core.owner.create import write_owner


def start_background_owner(run_dir: RunDir) -> None:
    """Start the owner of a prepared run in a process session of its own.

    Raises:
        MusterError: It can't be started.
    """
    log = os.open(run_dir.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        child = proc.start(
            [sys.executable, "-m", "torchmuster.core.owner.detach", run_dir.path],
            env=proc.own_package_environment(),
            stdout=log,
        )
    finally:
        os.close(log)
    write_owner(run_dir, child.pid)  # before we leave: `muster wait` may be called at once


def _own(path: str) -> int:
    os.dup2(1, 2)  # errors go to the log, too
    run_dir = RunDir(path)
    kind = run_dir.kind or Kind.RUN
    own: Callable[[RunDir], int] = plugs.find("kinds", f"{kind.value} own") or own_in_background
    return own(run_dir)


def own_in_background(run_dir: RunDir) -> int:
    """Own a prepared run to its end, as the background process; return its exit code.

    Raises:
        RunDirectoryError: It has no plan.
    """
    from torchmuster.core.engines.local import LocalEngine
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.owner.create import note_failed_start
    from torchmuster.core.owner.record import next_attempt, plan_to_own
    from torchmuster.core.owner.supervise import own_run

    plan = plan_to_own(run_dir)
    maybe_sweep = RunDir(os.path.dirname(os.path.dirname(run_dir.path)))
    special = "session" if plan.session is not None else None
    special = special or ("member" if os.path.exists(maybe_sweep.member_request) else None)
    if special is not None and (own := plugs.find("run_owners", special)) is not None:
        return int(own(plan, run_dir))
    voice = TerminalVoice()
    voice.start()
    engine = LocalEngine(plan, run_dir, tuple(visible_gpus()))
    with note_failed_start(run_dir):  # a sweep may restart a member
        engine.start_all(first_attempt=next_attempt(run_dir))
    result = own_run(engine, voice)
    voice.flush(5.0)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(_own(sys.argv[1]))
