"""`--json` of commands that start or follow a run: one object as the last line of standard output."""

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import click

from torchmuster.core import plugs
from torchmuster.core.cli import ending
from torchmuster.core.model.states import RunState
from torchmuster.errors import ManyErrors, MusterError

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
    global _given
    _given = True
    ending.followed = None
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
        found = _answer(code, may_go_on=is_detached or code == ending.CONTINUES_CODE)
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
    known = answer_of(ending.followed) if ending.followed is not None and answer_of else {}
    goes_on = may_go_on and bool(known) and not RunState(known["state"]).is_final
    return {**NOTHING, **known, "exit_code": None if goes_on else code}


def _tell_events(out: Any, over: threading.Event) -> None:
    """Write the lines of the run's record as they come."""
    from torchmuster.core.owner.record import RecordTail

    tail = None
    while True:
        is_last = over.wait(_LOOK_S)
        if tail is None and ending.followed is not None:
            tail = RecordTail(ending.followed.events)
        for line in tail.read()[0] if tail is not None else ():
            print(json.dumps(line), file=out, flush=True)
        if is_last:
            return
