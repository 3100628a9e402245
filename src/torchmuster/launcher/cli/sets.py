"""`--set a=1 b=2 FILE --set c=3`: options with several values that never take the file's name."""

import os
import re
from typing import Any

import click

from torchmuster.errors import UsageError

MANY = ("--set", "--set-string", "--set-env", "--env", "--label", "--grid", "--zip")
_PAIR = re.compile(r"[^-=][^=]*=")


class NearMissGroup(click.Group):
    """A command group that suggests the nearest command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help if no command is given."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command for one that does not exist."""
        name = args[0] if args else ""
        if name and name not in self.commands and not name.startswith("-"):
            from torchmuster.core.model.text import nearest

            near = nearest(name, self.commands)
            path = ctx.command_path
            fix = f"did you mean `{path} {near}`?" if near else f"{path} --help"
            raise UsageError(f"`{path}` has no command `{name}`", fix=fix)
        return super().resolve_command(ctx, args)


def spread(words: list[str]) -> list[str]:
    """Repeat the option before each of its several values.

    Raises:
        UsageError: An option has no value, and would take the file's name instead.
    """
    out: list[str] = []
    option: str | None = None
    for i, word in enumerate(words):
        if word == "--":
            return out + words[i:]
        if word in MANY:
            option = word
            if i + 1 < len(words) and _is_file(words[i + 1]):
                what = f"`{word}` needs a value, but a file follows it"
                raise UsageError(what, where=words[i + 1], fix=f"{word} NAME=VALUE {words[i + 1]}")
            # Without a value click complains; with one, the loop below adds the option again.
            if i + 1 == len(words) or not _is_pair(words[i + 1]):
                out.append(word)
                option = None
            continue
        if option is not None and _is_pair(word):
            out += [option, word]
            continue
        option = None
        out.append(word)
    return out


def _is_pair(word: str) -> bool:
    """Return whether a word is NAME=VALUE, not a workflow file with `=` in its name."""
    return bool(_PAIR.match(word)) and not _is_file(word)


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) and os.path.isfile(word)


class SetCommand(click.Command):
    """A command whose `--set` and similar options take several words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give click one value after each option."""
        return super().parse_args(ctx, spread(args))


def value_options(function: Any) -> Any:
    """Add the options that set template values."""
    texts = click.option(
        "--set-string",
        "set_strings",
        multiple=True,
        metavar="NAME=TEXT ...",
        help="The same, always as text.",
    )
    values = click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="NAME=VALUE ...",
        help="Values for the template.",
    )
    return values(texts(function))
