"""`muster data`: files at URLs."""

import json
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.spelling import NearMissGroup
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.workflow.data.files import TransferProgress, TransferResult


# Output that `muster data` and `muster dataset` share: progress, notes and results.


_REDRAW_S = 0.2
_BAR_WIDTH = 30


class Bar:
    """A progress bar on one line of standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._next_s = 0.0
        self._is_drawn = False
        self._began_at: float | None = None
        self._began_bytes = 0

    def update(self, state: "TransferProgress") -> None:
        """Draw the progress, at limited intervals."""
        now_s = time.monotonic()
        if not self._is_terminal or now_s < self._next_s:
            return
        from torchmuster.core.model.text import show_transfer

        share = state.bytes_done / state.total_bytes if state.total_bytes else 1.0
        full = int(_BAR_WIDTH * min(max(share, 0.0), 1.0))
        if self._began_at is None:
            self._began_at, self._began_bytes = now_s, state.bytes_done
        elapsed_s, before = now_s - self._began_at, self._began_bytes
        words = show_transfer(state.bytes_done, state.total_bytes, elapsed_s, before_bytes=before)
        files = f"{state.files_done}/{state.num_files} files"
        with self._lock:
            self._next_s = now_s + _REDRAW_S
            self._is_drawn = True
            bar = "#" * full + "." * (_BAR_WIDTH - full)
            line = f"[{bar}] {words}, {files}"[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def say(sentence: str) -> None:
    """Print a sentence that is not a result, to standard error."""
    click.echo(sentence, err=True)


def describe(moved: "TransferResult", verb: str) -> str:
    """Return a line about the result of a transfer."""
    from torchmuster.core.model.text import show_size

    skipped = f", {moved.num_skipped} were there already" if moved.num_skipped else ""
    return f"{moved.num_files} files {verb}, {show_size(moved.total_bytes)}{skipped}"


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
    from torchmuster.workflow.data.files import compile_regex
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
