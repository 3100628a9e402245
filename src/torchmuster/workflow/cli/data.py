"""`muster data`: files at URLs."""

import json

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.spelling import NearMissGroup
from torchmuster.errors import UsageError
from torchmuster.workflow.cli.transfers import Bar, describe, say


@click.group(cls=NearMissGroup)
def data() -> None:
    """Move files to and from s3://, gs://, azure:// and folders."""


@data.command()
@click.argument("url")
@click.argument("folder", default=".")
@options.regex
@options.parallel
def download(url: str, folder: str, *, regex: str | None, parallel: int) -> int:
    """Download the files at URL into FOLDER; files that are already there are kept."""
    from torchmuster.workflow.data import transfer

    with Bar() as bar:
        moved = transfer.download(
            url, folder, regex=regex, progress=bar.update, note=say, num_parallel=parallel
        )
    click.echo(describe(moved, "downloaded"))
    return 0


@data.command()
@click.argument("folder")
@click.argument("url")
@options.regex
@options.parallel
def upload(folder: str, url: str, *, regex: str | None, parallel: int) -> int:
    """Upload FOLDER (or a file) to URL; files that are already there are not sent again."""
    from torchmuster.workflow.data import transfer

    if "://" in folder and "://" not in url:
        what = "the folder comes first, then the URL"
        raise UsageError(what, fix=f"muster data upload {url} {folder}, or muster data download")
    with Bar() as bar:
        moved = transfer.upload(
            folder, url, regex=regex, progress=bar.update, note=say, num_parallel=parallel
        )
    click.echo(describe(moved, "uploaded"))
    return 0


@data.command("list")
@click.argument("url")
@options.regex
@options.json()
def list_files(url: str, *, regex: str | None, as_json: bool) -> int:
    """List the files that a download of URL would fetch."""
    from torchmuster.core.model.text import show_size
    from torchmuster.launcher.ui.table import render_table
    from torchmuster.workflow.data import transfer
    from torchmuster.workflow.data.names import compile_regex
    from torchmuster.workflow.data.remote import open_store

    matches = compile_regex(regex)
    found = transfer.list_files(open_store(url))
    sizes = {name: file.size_bytes for name, file in found.items() if matches(name)}
    if as_json:
        plain = [{"name": name, "size_bytes": size_bytes} for name, size_bytes in sizes.items()]
        click.echo(json.dumps(plain, indent=1))
        return 0
    if not sizes:
        say(f"no files at {url}")
        return 0
    rows = [[show_size(size_bytes), name] for name, size_bytes in sizes.items()]
    click.echo(render_table(["SIZE", "NAME"], rows), nl=False)
    return 0


@data.command()
@click.argument("url")
@options.regex
@options.yes
def delete(url: str, *, regex: str | None, yes: bool) -> int:
    """Remove the files at URL."""
    from torchmuster.workflow.data.transfer import delete_files, find_files

    names = find_files(url, regex)
    if not names:
        say(f"no files at {url}")
        return 0
    if not yes:
        click.confirm(f"remove {len(names)} files at {url}?", abort=True, err=True)
    delete_files(url, names)
    click.echo(f"{len(names)} files removed")
    return 0


@data.command()
@click.argument("url")
@click.option(
    "--access-type",
    type=click.Choice(["READ", "WRITE", "DELETE"], case_sensitive=False),
    default="READ",
    help="WRITE and DELETE write a small file and remove it.",
)
def check(url: str, *, access_type: str) -> int:
    """Check whether URL can be read, written to or deleted from."""
    from torchmuster.workflow.data.transfer import check_access

    check_access(url, access_type.upper())
    click.echo(f"{access_type.upper()} works: {url}")
    return 0
