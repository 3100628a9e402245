"""`muster data`, files at URLs, and `muster dataset`, versioned datasets."""

import json
import shutil
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

import click

from torchmuster.core.cli import options
from torchmuster.errors import MusterError, UsageError
from torchmuster.launcher.cli.echo import echo
from torchmuster.launcher.cli.sets import NearMissGroup

if TYPE_CHECKING:
    from torchmuster.workflow.data.dataset import DatasetStore
    from torchmuster.workflow.data.files import TransferProgress, TransferResult


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


@click.group(cls=NearMissGroup)
@click.option("--store", metavar="URL", help="Where datasets are; default: MUSTER_DATASETS.")
@click.pass_context
def dataset(ctx: click.Context, store: str | None) -> None:
    """Keep versions of datasets; NAME is [bucket/]NAME[:tag or version]."""
    ctx.obj = store


def _open(ctx: click.Context) -> "DatasetStore":
    from torchmuster.workflow.data.dataset import DatasetStore

    return DatasetStore(ctx.obj, note=say)


@dataset.command("upload")
@click.argument("name")
@click.argument("folder")
@click.option("--path", "paths", multiple=True, help="Only this part of FOLDER; may be repeated.")
@options.regex
@click.option("--tag", "tags", multiple=True, help="A tag for the new version; may be repeated.")
@options.metadata
@click.option("--label", "labels", multiple=True, help="key=value, of the dataset.")
@click.pass_context
def upload_version(
    ctx: click.Context,
    name: str,
    folder: str,
    *,
    paths: tuple[str, ...],
    regex: str | None,
    tags: tuple[str, ...],
    metadata: tuple[str, ...],
    labels: tuple[str, ...],
) -> int:
    """Make a new version of NAME from FOLDER; unchanged files are not sent again."""
    from torchmuster.workflow.data.reference import parse_metadata

    with Bar() as bar:
        version = _open(ctx).upload(
            name,
            folder,
            paths=paths or None,
            regex=regex,
            tags=tags,
            metadata=parse_metadata(metadata),
            labels=parse_metadata(labels, "--label"),
            progress=bar.update,
        )
    echo(f"{name.partition(':')[0]}:{version}")
    return 0


@dataset.command()
@click.argument("name")
@click.option("--add", multiple=True, metavar="LOCAL[:FOLDER]", help="Add files; may be repeated.")
@click.option("--remove", metavar="REGEX", help="Leave out files whose path matches.")
@click.option("--tag", "tags", multiple=True, help="A tag for the new version.")
@options.metadata
@click.pass_context
def update(
    ctx: click.Context,
    name: str,
    *,
    add: tuple[str, ...],
    remove: str | None,
    tags: tuple[str, ...],
    metadata: tuple[str, ...],
) -> int:
    """Make a new version of NAME with files added or removed."""
    from torchmuster.workflow.data.reference import parse_metadata

    if not add and remove is None:
        raise UsageError("there is nothing to change", fix="--add LOCAL:FOLDER or --remove REGEX")
    pairs = [(local, below) for local, _, below in (word.partition(":") for word in add)]
    with Bar() as bar:
        version = _open(ctx).update(
            name,
            add=pairs,
            remove=remove,
            tags=tags,
            metadata=parse_metadata(metadata),
            progress=bar.update,
        )
    echo(f"{name.partition(':')[0]}:{version}")
    return 0


@dataset.command("download")
@click.argument("name")
@click.argument("folder", default=".")
@options.regex
@click.pass_context
def download_version(ctx: click.Context, name: str, folder: str, *, regex: str | None) -> int:
    """Download the files of NAME into FOLDER; files that are already there are kept."""
    with Bar() as bar:
        moved = _open(ctx).download(name, folder, regex=regex, progress=bar.update)
    echo(describe(moved, "downloaded"))
    return 0


@dataset.command("list")
@options.json()
@click.pass_context
def list_datasets(ctx: click.Context, *, as_json: bool) -> int:
    """List the datasets."""
    from dataclasses import asdict

    from torchmuster.launcher.ui.table import render_table

    store = _open(ctx)
    found = store.list()
    if as_json:
        echo(json.dumps([asdict(one) for one in found], indent=1))
        return 0
    if not found:
        say(f"no datasets in {store.url}")
        return 0
    rows = [
        [
            one.name,
            str(one.versions[-1]),
            str(len(one.versions)),
            f"{datetime.fromtimestamp(one.modified_s, UTC):%Y-%m-%d %H:%M}"
            if one.modified_s
            else "-",
            ", ".join(one.tags) or "-",
        ]
        for one in found
    ]
    echo(render_table(["NAME", "NEWEST", "VERSIONS", "CHANGED", "TAGS"], rows), nl=False)
    return 0


@dataset.command()
@click.argument("name")
@click.option("--files", "with_files", is_flag=True, help="Each file too.")
@options.json("As JSON, with the files.")
@click.pass_context
def info(ctx: click.Context, name: str, *, with_files: bool, as_json: bool) -> int:
    """Show a version of NAME."""
    from torchmuster.core.model.text import show_size

    store = _open(ctx)
    found = store.info(name)
    reference = f"{found.name}:{found.version}"
    tags, labels = list(store.tags_of(reference)), store.labels(found.name)
    if as_json:
        facts = {"checksum": found.checksum, "size_bytes": found.size_bytes}
        plain = {**found.plain(), **facts, "tags": tags, "labels": labels}
        echo(json.dumps(plain, indent=1))
        return 0
    echo(f"dataset   {reference}")
    echo(f"created   {found.created}" + (f" by {found.run_id}" if found.run_id else ""))
    echo(f"files     {len(found.files)}, {show_size(found.size_bytes)}")
    echo(f"checksum  {found.checksum}")
    echo(f"tags      {', '.join(tags) or '-'}")
    for title, values in (("metadata", found.metadata), ("label", labels)):
        for key, value in values.items():
            echo(f"{title:<10}{key} = {value}")
    for path, file in found.files.items() if with_files else ():
        echo(f"  {show_size(file.size_bytes):>10}  {path}")
    return 0


@dataset.command()
@click.argument("name")
@click.argument("tag")
@click.option("--remove", is_flag=True, help="Remove the tag instead.")
@click.pass_context
def tag(ctx: click.Context, name: str, tag: str, *, remove: bool) -> int:
    """Let TAG point to a version of NAME."""
    store = _open(ctx)
    store.tag(name, tag, remove=remove)
    wanted = store.resolve(name)
    verb = "is removed" if remove else f"points to version {wanted.version}"
    echo(f"{wanted.name}: `{tag}` {verb}")
    return 0


@dataset.command("delete")
@click.argument("name")
@click.option("-a", "--all", "everything", is_flag=True, help="All versions of NAME.")
@options.yes
@click.pass_context
def delete_version(ctx: click.Context, name: str, *, everything: bool, yes: bool) -> int:
    """Remove a version of NAME, or all with --all."""
    store = _open(ctx)
    wanted = store.resolve(name)
    if not yes:
        which = f"all versions of {wanted.name}" if everything else str(wanted)
        click.confirm(f"remove {which} from {store.url}?", abort=True, err=True)
    numbers = store.delete(name, all_versions=everything)
    echo("removed: " + ", ".join(f"{wanted.name}:{number}" for number in numbers))
    say("`muster dataset gc` removes the contents that no version needs")
    return 0


@dataset.command()
@click.argument("name")
@click.pass_context
def checksum(ctx: click.Context, name: str) -> int:
    """Print the SHA-256 of a version: of all paths, modes and contents."""
    echo(_open(ctx).info(name).checksum)
    return 0


@dataset.command()
@click.argument("name")
@click.pass_context
def verify(ctx: click.Context, name: str) -> int:
    """Read every file of a version again and compare it with its checksum."""
    store = _open(ctx)
    with Bar() as bar:
        problems = store.verify(name, bar.update)
    for problem in problems:
        echo(problem)
    if problems:
        fix = "upload the files again: the damaged contents have to be removed from the store first"
        raise MusterError(
            f"{len(problems)} files of `{name}` are damaged", where=store.url, fix=fix
        )
    echo(f"{store.resolve(name)} is whole")
    return 0


@dataset.command()
@click.option("--older-than", default="1d", help="Only what is older; default 1d.")
@options.yes
@click.pass_context
def gc(ctx: click.Context, *, older_than: str, yes: bool) -> int:
    """Remove contents that no version needs."""
    from torchmuster.core.model.text import show_size
    from torchmuster.core.spec.problems import parse_timeout

    age_s = parse_timeout(older_than)
    if age_s is None:
        raise UsageError(
            f"`{older_than}` is not a valid duration", where="--older-than", fix="12h or 7d"
        )
    store = _open(ctx)
    if not yes:
        click.confirm(
            f"remove contents that no version in {store.url} needs?", abort=True, err=True
        )
    number, size_bytes = store.gc(older_than_s=age_s)
    echo(f"{number} objects removed, {show_size(size_bytes)}")
    return 0
