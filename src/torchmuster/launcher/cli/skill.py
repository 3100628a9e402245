"""`muster skill`: the text from which an agent, or a script's author, learns to use muster."""

from importlib import resources

import click

from torchmuster.launcher.cli.echo import echo


@click.command()
def skill() -> int:
    """Print what an agent needs to know to use muster: SKILL.md."""
    echo(resources.files("torchmuster.launcher.cli").joinpath("skill.md").read_text(), nl=False)
    return 0
