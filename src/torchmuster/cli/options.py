"""Options that several commands have, each declared once: the same name, meaning and words everywhere."""

from collections.abc import Callable
from typing import Any

import click

from torchmuster.cli.completion import complete_engines

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
    shell_complete=complete_engines,
)
parallel = click.option(
    "--parallel", type=click.IntRange(1, 256), default=8, help="Files at a time."
)
regex = click.option("--regex", help="Only files whose relative path matches (re.match).")
yes = click.option("-y", "--yes", is_flag=True, help="Without asking.")

# With what a job runs, and what it asks for.
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
    """Return `--json`; `words` say more where it is not what the command prints otherwise."""
    return click.option("--json", "as_json", is_flag=True, help=words)
