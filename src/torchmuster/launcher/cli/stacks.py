"""`muster stacks`: show where the ranks of a live run are."""

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.options import complete_runs
from torchmuster.launcher.cli.echo import echo


@click.command()
@click.argument("run", shell_complete=complete_runs)
@options.json()
def stacks(run: str, *, as_json: bool) -> int:
    """Show the Python stacks of all ranks of the running RUN, equal ones together.

    The first line says which ranks wait in which collective and which do something else. The
    workers keep running: a signal handler writes their stacks, also while C code holds the
    interpreter's lock. For processes that can't answer, py-spy is used if it is installed on the
    node.
    """
    import asyncio
    import json

    from torchmuster.launcher.views.execute import ask_stacks
    from torchmuster.launcher.views.find import find_run

    found = asyncio.run(ask_stacks(find_run(run)))
    if as_json:
        echo(json.dumps({"sentence": found.sentence, "stacks": list(found.lines)}, indent=1))
        return 0
    echo(found.sentence)
    if found.lines:
        echo()
    for line in found.lines:
        echo(line)
    return 0
