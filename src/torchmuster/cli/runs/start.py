"""Starts a run whose agents are processes of this machine, and follows it."""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmuster.files.layout import RunDir
    from torchmuster.spec.launch import RunRequest
    from torchmuster.spec.problems import Problems

_SOON_S = 600.0


def choose_id(request: "RunRequest", problems: "Problems") -> str:
    """Return the id of the run; a problem is noted."""
    from torchmuster.errors import UsageError
    from torchmuster.owner.create import choose_run_id

    try:
        return choose_run_id(request.script, request.run_id, request.name)
    except UsageError as error:
        problems.found.append(error)
        return ""


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


def say_when_it_ends(run_dir: "RunDir", name: str) -> None:
    """Warn of the end of the session's time: its idle time begins anew with the run."""
    import click

    from torchmuster.errors import ChannelError
    from torchmuster.model.display.text import in_minutes
    from torchmuster.node.door import messages
    from torchmuster.node.door.call import ask

    try:
        state = ask(run_dir, 0, messages.AskDoor())
    except ChannelError:
        return  # the start says it
    if not isinstance(state, messages.DoorState):
        return
    left_s = state.ends_in_s
    if left_s is not None and left_s < _SOON_S and "time limit" in state.why_ends:
        click.echo(
            f"muster: the session {name} ends in {in_minutes(left_s)}: {state.why_ends}", err=True
        )
