"""Starts a run whose agents are processes of this machine, and follows it."""

import os
from functools import partial
from typing import TYPE_CHECKING, Any

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
    if request.pdb and not (_is_terminal(0) and _is_terminal(1)):
        why = "standard input or output of this command is none"
        fix = "muster run --debugpy, for an editor; `muster logs RUN` has the traceback"
        problems.add("--pdb needs a terminal", "--pdb", why, fix)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def start(plan: Any, run_dir: Any, gpus: Any, *, detach: bool, session: Any = None) -> int:
    """Start what is planned and follow it to its end, or leave it in the background."""
    from torchmuster.cli.ending import follow_run, go_to_the_background, leave_in_background

    if detach:
        return leave_in_background(run_dir, plan.run_id)
    go_to_the_background(plan.run_id, run_dir)  # before the agents inherit where we write
    from torchmuster.files.terminal import own_terminal

    terminal = own_terminal()
    if session is not None:
        from torchmuster.engines.session import SessionEngine

        held = SessionEngine(plan, run_dir, tuple(gpus), terminal=terminal, session=session)
        return follow_run(plan, run_dir, partial(_follow_in_session, held))
    from torchmuster.engines.local import LocalEngine
    from torchmuster.owner.create import note_failed_start

    engine = LocalEngine(plan, run_dir, tuple(gpus), terminal=terminal)
    with note_failed_start(run_dir):
        engine.start_all()
    return follow_run(plan, run_dir, partial(_follow, engine))


def _follow_in_session(engine: Any, voice: Any) -> Any:
    from torchmuster.owner.create import note_failed_start

    engine.say = voice.explain
    with note_failed_start(engine.run_dir):
        engine.start_all()
    return _follow(engine, voice)


def _follow(engine: Any, voice: Any) -> Any:
    from torchmuster.files.layout import short_id
    from torchmuster.owner.session import note_on_session
    from torchmuster.owner.supervise import own_run  # while the agents start
    from torchmuster.owner.views.account import near

    plan, run_dir = engine.plan, engine.run_dir
    voice.say(f"run {short_id(plan.run_id)}: {_size(plan)}; logs in {near(run_dir.logs)}")
    note = note_on_session()
    if note is not None:
        voice.say(note)
    return own_run(engine, voice, forward_stdin=plan.stdin_rank is not None)


def _size(plan: Any) -> str:
    nodes = f"{plan.min_nodes} to {plan.max_nodes}" if plan.is_elastic else str(plan.max_nodes)
    total = sum(plan.num_workers(place) for place in range(plan.max_nodes))
    most = "up to " if plan.is_elastic else ""
    workers = f"{most}{total} worker{'s' if total != 1 else ''}"
    spares = f", {plan.spares} spare" if plan.spares else ""
    return f"{workers} on {nodes} node{'s' if plan.max_nodes != 1 else ''}{spares}"
