"""Print text with foreign names and paths in it, without control characters for the terminal; print SKILL.md."""

import json
import math
from typing import Any

import click

from torchmuster.core.model.text import printable


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text to standard output, or standard error, without control characters."""
    click.echo(printable(text), err=err, nl=nl)


def echo_json(plain: Any) -> None:
    """Print plain values as JSON; nan and infinities become strings, since JSON lacks them."""
    echo(json.dumps(_finite(plain), indent=1, allow_nan=False))


def _finite(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _finite(value) for name, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_finite(value) for value in plain]
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    return plain


@click.command()
def skill() -> int:
    """Print what an agent needs to know to use muster: SKILL.md."""
    from importlib import resources

    echo(resources.files("torchmuster.launcher.cli").joinpath("skill.md").read_text(), nl=False)
    return 0
