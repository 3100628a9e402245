"""What a shell completes: run ids, `last`, and what `--on` names. Quick: names of folders, and keys of muster.toml."""

import os
from typing import Any

import click
from click.shell_completion import CompletionItem


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return `last` and the short ids that begin so; whole ids where that is what was typed."""
    from torchmuster.files.layout import runs_dir, short_id

    try:
        names = sorted(os.listdir(runs_dir()), reverse=True)
    except OSError:
        names = []
    whole = [name for name in names if incomplete and name.startswith(incomplete)]
    short = [short_id(name) for name in names if short_id(name).startswith(incomplete)]
    last = ["last"] if "last".startswith(incomplete) else []
    return list(dict.fromkeys([*last, *short, *whole]))


def complete_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Leave it to the shell, which knows files best."""
    return [CompletionItem(incomplete, type="file")]


def complete_engines(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the kinds of engines and the names of the user's own that begin so."""
    from torchmuster.engines.registry import engine_entries
    from torchmuster.spec.sites.files import project_file, user_file

    names = ["local", "ssh", *engine_entries()]
    for path in (user_file(os.environ), project_file(os.getcwd())):
        names += _engines_of(path) if path is not None else []
    return sorted({name for name in names if name.startswith(incomplete)})


def _engines_of(path: str) -> list[str]:
    import tomllib

    try:
        with open(path, "rb") as file:
            engines: Any = tomllib.load(file).get("engines")
    except (OSError, ValueError):
        return []
    return list(engines) if isinstance(engines, dict) else []


def complete_sessions(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of sessions that begin so; whether they live costs more than a key."""
    from torchmuster.owner.views.sessions import name_of_session, session_dirs

    names = dict.fromkeys(name_of_session(one) for one in session_dirs())
    return [name for name in names if name.startswith(incomplete)]
