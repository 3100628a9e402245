"""`muster init`: write a first `muster.toml` from what is found on this machine."""

import json
import os
import shutil
from typing import TYPE_CHECKING

import click

from torchmuster.errors import MusterError, UsageError
from torchmuster.launcher.views.elsewhere import elsewhere

if TYPE_CHECKING:
    from torchmuster.launcher.engines.base import Queue
    from torchmuster.launcher.jobs.detect import QueueList, Which

_MAX_LISTED = 50
_HEAD = """\
# Where `muster run --on NAME` and `muster submit --on NAME` send their work.
# Lines with a # in front are examples. `muster engines check NAME` looks at one engine.
"""
_SSH = """
# Hosts that you reach by ssh without a password:
# [engines.hosts]
# kind = "ssh"
# hosts = ["node1 slots=4", "node2 slots=4"]
"""
_REST = """\
# account = "NAME"
# time = "2h"
# directives = ["{directive}"]
# setup = ["module load NAME", "source venv/bin/activate"]
"""
_DEFAULTS = """
[defaults]
# on = "{name}"   # what is used without --on
"""


@click.command()
def init() -> int:
    """Write a first muster.toml into this folder, from what is found here, and print it.

    The scheduler is asked for its partitions or queues; accounts and modules are not guessed. A
    file that exists already is not changed.
    """
    path = os.path.abspath("muster.toml")
    if os.path.lexists(path):
        raise _refusal(path)
    text = first_file(shutil.which)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _refusal(path) from None
    except OSError as error:
        raise MusterError("the file can't be written", where=path, why=error.strerror) from error
    click.echo(text, nl=False)
    click.echo(f"muster: {path} is written", err=True)
    return 0


def first_file(which: "Which") -> str:
    """Return the text of a first `muster.toml`, which `load_sites` can read."""
    from torchmuster.launcher.engines.registry import schedulers
    from torchmuster.launcher.engines.schedulers import CLIENTS, SCHEDULERS, kind_of_client
    from torchmuster.launcher.jobs.detect import find_tool, list_queues
    from torchmuster.launcher.model.scheduler import REMOVED_ENGINES

    names = [
        kind_of_client(client, find_tool(client, which).version)
        for client in CLIENTS
        if which(client) is not None
    ]
    others = [facts for name, facts in schedulers().items() if name not in SCHEDULERS]
    names += [facts.name for facts in others if facts.client and which(facts.client) is not None]
    removed = [name for name in names if name in REMOVED_ENGINES]
    names = [name for name in names if name not in removed]
    parts = [_HEAD, *(section(name, list_queues(name)) for name in names)]
    parts += [f"\n# {'; '.join(REMOVED_ENGINES[name])}\n" for name in removed]
    if (cluster := elsewhere().first_section(which)) is not None:
        names.append(cluster[0])
        parts.append(cluster[1])
    if not names and not removed:
        parts.append(f"\n# Neither {' nor '.join(CLIENTS)} is on PATH: no cluster was found.\n")
    parts += [_SSH, _DEFAULTS.format(name=names[0] if names else "hosts")]
    return "".join(parts)


def section(kind: str, found: "QueueList") -> str:
    """Return the section of a scheduler."""
    from torchmuster.launcher.engines.registry import schedulers

    facts = schedulers()[kind]
    word = facts.queue_word
    lines = ["", f"[engines.{kind}]", f"kind = {json.dumps(kind)}"]
    if found.problem is not None:
        lines.append(f"# {word}s could not be listed: {_comment(found.problem)}")
    lines += _queue_lines(word, found.queues)
    return "\n".join(lines) + "\n" + _REST.format(directive=facts.example)


def _queue_lines(word: str, queues: "tuple[Queue, ...]") -> list[str]:
    """Return a line that selects the default or only queue, and a comment with all of them."""
    usable = [queue for queue in queues if queue.is_open and queue.starts] or list(queues)
    chosen = next((queue for queue in usable if queue.is_default), None)
    if chosen is None and len(usable) == 1:
        chosen = usable[0]
    lines = (
        [f"{word} = {json.dumps(chosen.name)}"] if chosen is not None else [f'# {word} = "NAME"']
    )
    for queue in queues[:_MAX_LISTED]:
        closed = ", takes no jobs now" if not queue.is_open else ""
        closed = closed or ("" if queue.starts else ", starts no jobs now")
        lines.append(f"#   {_comment(queue.name)}: {_comment(queue.about)}{closed}")
    if len(queues) > _MAX_LISTED:
        lines.append(f"#   and {len(queues) - _MAX_LISTED} more")
    return lines


def _comment(text: str) -> str:
    """Replace characters that can't be in a TOML comment, such as newlines."""
    return "".join(c if c.isprintable() else " " for c in text)


def _refusal(path: str) -> UsageError:
    fix = "edit it; muster engines shows what it says"
    return UsageError("there is a muster.toml already: it was not changed", where=path, fix=fix)
