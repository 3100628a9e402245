"""Options that several commands share, each declared once with one name, meaning and help text."""

import os
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from torchmuster.core import plugs

# Shell completion of run ids, `last`, and the names for `--on`. It reads only folder names and keys
# of muster.toml, so it is quick.


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return `last` and short ids with this prefix; full ids if a full id was begun."""
    from torchmuster.core.files.layout import runs_dir, short_id

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
    """Leave file names to the shell, which completes them best."""
    return [CompletionItem(incomplete, type="file")]


def complete(what: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a completion function for the names at the plug point `completions` under `what`."""

    def names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        known = plugs.find("completions", what)
        return sorted({one for one in known() if one.startswith(incomplete)}) if known else []

    return names


def add_start_options(callback: Callable[..., int]) -> Callable[..., int]:
    """Add the options of the plug point `start_options`: to every command that starts something."""
    for add in plugs.every("start_options"):
        callback = add(callback)
    return callback


last_run = click.argument("run", default="last", shell_complete=complete_runs)
detach = click.option(
    "--detach", is_flag=True, help="Return at once; the run continues in the background."
)
here = click.option("--here", is_flag=True, help="Run on this machine, even inside a job.")
metadata = click.option("--metadata", multiple=True, help="key=value, or a YAML or JSON file.")
on = click.option(
    "--on",
    "engine",
    metavar="NAME",
    help="Engine or site; default this machine.",
    shell_complete=complete("engines"),
)
parallel = click.option(
    "--parallel", type=click.IntRange(1, 256), default=8, help="Files at a time."
)
regex = click.option("--regex", help="Only files whose relative path matches (re.match).")
yes = click.option("-y", "--yes", is_flag=True, help="Don't ask.")

# The interpreter of a job, and the resources it requests.
python = click.option(
    "--python", metavar="PATH", help="The job's interpreter, with flags if quoted."
)
hosts = click.option("--hosts", metavar="A,B:N", help="Hosts for --on ssh, with their workers.")
hostfile = click.option("--hostfile", metavar="FILE", help="A file of hosts for --on ssh.")
queue = click.option("--queue", "--partition", "queue", metavar="NAME", help="Queue or partition.")
account = click.option("--account", metavar="NAME", help="Account or project to charge.")
cpus_per_node = click.option(
    "--cpus-per-node", type=click.IntRange(min=1), metavar="N", help="CPUs of each node."
)
gpus_per_node = click.option(
    "--gpus-per-node", type=click.IntRange(min=0), metavar="N", help="GPUs of each node."
)


def json(words: str = "As JSON.") -> Callable[[Any], Any]:
    """Return `--json`; `words` is its help where the JSON has more than the plain output."""
    return click.option("--json", "as_json", is_flag=True, help=words)
