"""A command whose help shows its options in sections: thirty in one list are read by nobody."""

from collections.abc import Mapping, Sequence

import click


def sectioned(sections: Mapping[str, Sequence[str]]) -> type[click.Command]:
    """Return a class of commands with these sections: titles, and the options' names in `given`.

    An option that stands in none is listed last.
    """

    class Sectioned(click.Command):
        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            records = {
                str(param.name): record
                for param in self.get_params(ctx)
                if isinstance(param, click.Option)
                if (record := param.get_help_record(ctx)) is not None
            }
            for title, names in sections.items():
                with formatter.section(title):
                    formatter.write_dl([records.pop(name) for name in names])
            if records:
                with formatter.section("Other"):
                    formatter.write_dl(list(records.values()))

    return Sectioned
