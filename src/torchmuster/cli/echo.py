"""Print what a view says: names, paths and words of others in it are shown, never obeyed by the terminal."""

import click

from torchmuster.model.display.text import printable


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text of ours on standard output, or standard error."""
    click.echo(printable(text), err=err, nl=nl)
