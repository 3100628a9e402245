"""`muster cheer`: a command is one of click's."""

import click


@click.command()
@click.argument("run", default="last")
def cheer(run: str) -> int:
    """Cheer for RUN."""
    from torchmuster.launcher.views.find import find_run

    view = find_run(run)
    click.echo(f"go, {view.run_id}: {view.state.value}!")
    return 0
