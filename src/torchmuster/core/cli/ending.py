"""Follow a run from a command: terminal, verdict, last lines, exit code, and `--json`."""

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import click

from torchmuster.core import plugs
from torchmuster.core.model.states import RunState
from torchmuster.errors import ManyErrors, MusterError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result

CHOICES = ("off", "line", "full")  # rows of status below the output on a terminal
_KEY = "torchmuster.progress"


def _keep(context: click.Context, _: click.Parameter, value: str | None) -> None:
    context.meta[_KEY] = value


option = click.option(
    "--progress",
    type=click.Choice(CHOICES),
    expose_value=False,  # read only where the run is followed, many calls below
    callback=_keep,
    help="Status below the output, on a terminal: no, one row (default) or two.",
)


def wanted() -> str:
    """Return the value of `--progress` for the running command."""
    context = click.get_current_context(silent=True)
    return (context.meta.get(_KEY) if context is not None else None) or CHOICES[1]


CONTINUES_CODE = 130
# This process owns the run in the background; its caller waits for the run's id.
is_launched = False
# The run that this command has begun or follows, for `--json`.
followed: "RunDir | None" = None
# The run that the one to be begun continues.
continued: "RunDir | None" = None
# What wants to know of the record that a command makes, and of the start that follows.
companion: "Companion | None" = None
# `muster dev` shows only what the ranks print and why they failed, and prints its own last line.
is_brief = False


def is_terminal(fd: int) -> bool:
    """Say whether a descriptor is open, and a terminal."""
    try:
        return os.isatty(fd)
    except OSError:
        return False


class Screen(Protocol):
    """What a room shows or offers alongside the output of a run that is followed."""

    def start(self) -> None:
        """Begin."""

    def end(self) -> None:
        """Stop showing: the run has ended, and its last lines follow."""

    def close(self) -> None:
        """Clean up, whether or not the run has ended."""


class Companion(Protocol):
    """What a room adds to each start by a command of ours."""

    def prepare(self, run_dir: "RunDir", before: "RunDir | None") -> None:
        """Add to the record before anything starts; `before` is the run that it continues."""

    def start(self, run_dir: "RunDir") -> None:
        """Go along: the run, or its job, has been started."""


def note_record(run_dir: "RunDir") -> None:
    """Note which record this command has made, before it starts anything."""
    global followed
    if companion is not None and followed is None:
        companion.prepare(run_dir, continued)
    followed = run_dir


def note_start(run_dir: "RunDir") -> None:
    """Note what this command has started, and will follow or leave to the background."""
    global companion
    note_record(run_dir)
    going_along, companion = companion, None
    if going_along is not None:
        going_along.start(run_dir)


def follow_run(
    plan: Any,
    run_dir: "RunDir",
    follow: "Callable[[TerminalVoice], Any]",
    *,
    say: "Callable[[TerminalVoice, Any, RunDir], int] | None" = None,
) -> int:
    """Follow a run on the terminal, report how it ended, and return its exit code.

    Args:
        plan: The plan of the run, or of whatever else is followed.
        run_dir: Its run directory.
        follow: Follows it to its end. Returns None if it continues without this process, having
            printed how to view it again.
        say: Reports how it ended and returns the exit code; default `say_end`.
    """
    note_start(run_dir)
    go_to_the_background(plan.run_id, run_dir)
    voice = _voice_for(plan, run_dir)
    voice.start()
    screens: list[Screen] = [make(plan, run_dir, voice) for make in plugs.every("screens")]
    for screen in screens:
        screen.start()
    try:
        result = follow(voice)
        for screen in screens:
            screen.end()
        code = CONTINUES_CODE
        if result is not None:
            # `muster doctor` reports the end.
            is_read = getattr(plan, "preflight", "") in ("long", "only")
            say = say or partial(say_end, is_read=is_read)
            code = say(voice, result, run_dir)
            if not is_read and not is_brief:
                say_next(voice, run_dir, plan)
    finally:
        for screen in screens:
            screen.close()
        voice.flush(5.0)
    return code


def shown_here(plan: "RunPlan", *, detach: bool = False) -> "RunPlan":
    """Return the plan for a run that this process shows; files and pipes get every line."""
    from torchmuster.core.files.terminal import every_line_streams

    return replace(plan, every_line=() if detach or is_launched else every_line_streams())


def _voice_for(plan: Any, run_dir: "RunDir") -> "TerminalVoice":
    from torchmuster.core.files.disk import DiskWriter
    from torchmuster.core.files.terminal import BriefVoice, TerminalVoice

    kind = BriefVoice if is_brief else TerminalVoice
    voice = kind(prefix_always=plan.mixes_output)
    if getattr(plan, "every_line", ()):
        disk = DiskWriter(voice.lose, run_dir.path)
        disk.start()
        voice.write_every_line(lambda: run_dir.unread, disk)
    return voice


def go_to_the_background(run_id: str, run_dir: "RunDir") -> None:
    """If `launched`, print the run's id for the caller, then write output to the supervisor log."""
    global is_launched
    if not is_launched:
        return
    is_launched = False
    log = os.open(run_dir.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    print_id(run_id)
    sys.stdout.flush()
    sys.stderr.flush()
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)


def leave_in_background(run_dir: "RunDir", run_id: str) -> int:
    """Let a detached process follow the run; print the run's id."""
    from torchmuster.core.owner.detach import start_background_owner

    note_record(run_dir)
    start_background_owner(run_dir)
    note_start(run_dir)
    return print_id(run_id)


def print_id(run_id: str) -> int:
    """Print the id of a run that is not followed here."""
    click.echo(run_id)
    return 0


def last_line(result: "Result", run_dir: "RunDir") -> str:
    """Return the last line of a run: how it ended and, unless it succeeded, how to continue."""
    from torchmuster.core.cli.messages import summary

    if (whole := plugs.find("ends", "whole")) is not None:
        result = whole(result, run_dir)
    go_on = None if result.state is RunState.SUCCEEDED else plugs.find("ends", "go_on")
    return summary(result, go_on(run_dir, result) if go_on is not None else None)


def say_end(
    voice: "TerminalVoice", result: "Result", run_dir: "RunDir", *, is_read: bool = False
) -> int:
    """Report how a run has ended, unless its caller does (`is_read`); return its exit code."""
    from torchmuster.core.cli.messages import last_report, paint_report, uses_colour
    from torchmuster.core.owner.record import keep_result

    if not is_read:
        is_wanted = not (is_brief and result.state is RunState.CANCELLED)
        report = last_report(result, run_dir, voice.shown) if is_wanted else None
        if report is not None:
            voice.print(paint_report(report, colour=uses_colour()))
        voice.say(last_line(result, run_dir))
    if (why := keep_result(run_dir, result)) is not None:
        voice.say(
            f"this end can't be recorded in {run_dir.path} ({why}): `muster status` won't know of it"
        )
    left = plugs.find("ends", "left") if result.state is RunState.SUCCEEDED else None
    if not is_read and left is not None and os.path.isdir(run_dir.path):
        voice.say(left(run_dir))
    if not is_read and result.state in (RunState.FAILED, RunState.TIMED_OUT, RunState.LOST):
        say_report(voice, run_dir, result.run_id)
    return int(result.exit_code)


def say_next(voice: "TerminalVoice", run_dir: "RunDir", plan: Any) -> None:
    """Print last what to type next; a replay, and a record that is gone, have nothing."""
    following = plugs.find("ends", "next")
    if following is None or getattr(plan, "is_replay", False) or not os.path.isdir(run_dir.path):
        return
    if (command := following(run_dir, plan.run_id)) is not None:
        voice.print(f"next: {command}\n")


def say_report(voice: "TerminalVoice", run_dir: "RunDir", run_id: str) -> None:
    """Print last where the page of a failed run is, or how to make it; a replay has none."""
    from torchmuster.core.owner.record import read_plan

    plan = read_plan(run_dir)
    report: Any = plugs.find("ends", "report")
    is_replay = plan is not None and plan.is_replay
    if report is not None and os.path.isdir(run_dir.path) and not is_replay:
        voice.say(report(run_dir, run_id))


# `--json` of commands that start or follow a run: one object as the last line of standard output.

ANSWER, EVENTS = "answer", "events"
# Of a command that starts nothing; the answer on a run has these fields, too.
NOTHING: dict[str, Any] = {
    **dict.fromkeys(("id", "kind", "state", "exit_code", "attempts", "elapsed_s", "cause", "at")),
    **dict.fromkeys(("rank", "node", "hint", "step", "saved_step", "next")),
    "because": [],
    "more": [],
    "paths": dict.fromkeys(("run", "logs", "snapshots", "report")),
}
_OF_MISTAKES = ("exit_code", "cause", "at", "because", "hint", "more")
_LOOK_S = 0.1
_given = False  # by this process


def whole_word(arguments: list[str]) -> list[str]:
    """Return the words with `--json` as `--json=answer`: it takes a value only behind `=`."""
    return [f"--json={ANSWER}" if word == "--json" else word for word in arguments]


class AnswerCommand(click.Command):
    """A command with `--json`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let `--json` never consume the next word."""
        return super().parse_args(ctx, whole_word(args))


def answer_unless_given(
    command: click.Command | None, words: Sequence[str], errors: Sequence[MusterError]
) -> None:
    """Answer for a command that was asked to, but whose command line can't be read as a whole."""
    if command is None or _given or not hasattr(command.callback, "answers"):
        return
    ours = words
    if not command.context_settings.get("allow_interspersed_args", True):  # the script has its own
        scripts = (at for at, word in enumerate(words) if word == "--" or os.path.exists(word))
        ours = words[: next(scripts, len(words))]
    if any(word.partition("=")[0] == "--json" for word in ours):
        print(json.dumps(answer_on_mistakes(errors)), flush=True)


def answer_on_mistakes(errors: Sequence[MusterError]) -> dict[str, Any]:
    """Return the answer of a command that has refused to start."""
    first, *more = errors
    return {
        **NOTHING,
        "exit_code": first.exit_code,
        "cause": first.what,
        "at": first.where,
        "because": (first.why or "").splitlines(),
        "hint": first.fix,
        "more": [other.what for other in more],
    }


def answers(callback: Callable[..., int], *, shows: bool = False) -> Callable[..., int]:
    """Give a command `--json`: what it prints goes to standard error, the answer to standard output.

    Args:
        callback: The command.
        shows: Its dry run shows JSON of its own on standard output, if `as_json` is true.
    """

    @click.option(
        "--json",
        "answer",
        type=click.Choice([ANSWER, EVENTS]),
        metavar="[=events]",
        help="All output to standard error; last on standard output, one JSON object on the end.",
    )
    @functools.wraps(callback)
    def answering(*words: Any, answer: str | None, **given: Any) -> int:
        given |= {"as_json": answer is not None} if shows else {}
        if answer is None or (shows and given.get("dry_run")):
            return callback(*words, **given)
        command = functools.partial(callback, *words, **given)
        is_detached = bool(given.get("detach"))
        return _give(command, has_events=answer == EVENTS, is_detached=is_detached)

    answering.answers = True  # type: ignore[attr-defined]
    return answering


def _give(command: Callable[[], int], *, has_events: bool, is_detached: bool) -> int:
    global _given, followed
    _given, followed = True, None
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)  # the ranks' output, and what other programs inherit
    over = threading.Event()
    teller = threading.Thread(target=_tell_events, args=(out, over), daemon=True)
    if has_events:
        teller.start()
    # Unless the command says otherwise: a script of `--inline` may raise anything.
    found = _answer(1)
    try:
        code = command()
        found = _answer(code, may_go_on=is_detached or code == CONTINUES_CODE)
    except SystemExit as end:
        found = _answer(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except (MusterError, ManyErrors) as error:
        refused = answer_on_mistakes(error.errors if isinstance(error, ManyErrors) else [error])
        found = _answer(0) | {name: refused[name] for name in _OF_MISTAKES}
        raise
    finally:
        over.set()
        if has_events:
            teller.join()
        print(json.dumps(found), file=out, flush=True)
    return code


def _answer(code: int, *, may_go_on: bool = False) -> dict[str, Any]:
    answer_of = plugs.find("ends", "answer")
    known = answer_of(followed) if followed is not None and answer_of else {}
    goes_on = may_go_on and bool(known) and not RunState(known["state"]).is_final
    return {**NOTHING, **known, "exit_code": None if goes_on else code}


def _tell_events(out: Any, over: threading.Event) -> None:
    """Write the lines of the run's record as they come."""
    from torchmuster.core.owner.record import RecordTail

    tail = None
    while True:
        is_last = over.wait(_LOOK_S)
        if tail is None and followed is not None:
            tail = RecordTail(followed.events)
        for line in tail.read()[0] if tail is not None else ():
            print(json.dumps(line), file=out, flush=True)
        if is_last:
            return
