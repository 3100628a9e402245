"""`muster engines`: where runs can go from here, and whether their commands were found."""

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.place import row
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Place
    from torchmuster.launcher.jobs.detect import Tool, Which
    from torchmuster.launcher.spec.site import Site, Sites

_NOT_TRIED = "nothing was submitted and no host was contacted"
_REFUSED = 14


@click.group(invoke_without_command=True)
@options.json()
@click.pass_context
def engines(context: click.Context, *, as_json: bool) -> int | None:
    """List the engines for `--on`, and which of them were found on this machine.

    \b
    muster engines                 all of them
    muster engines check NAME      one, with its partitions or queues
    """  # noqa: D301 - \b is click's mark
    if context.invoked_subcommand is not None:
        return None
    from torchmuster.launcher.cli.sites import my_sites

    return show_engines(my_sites(), shutil.which, as_json=as_json)


@engines.command()
@click.argument("name")
@click.option(
    "--job/--no-job",
    default=True,
    help="Submit a one-node test job, contact the hosts of ssh; default yes.",
)
@click.option(
    "--timeout", default="10m", metavar="TIME", help="Cancel a test job after this; default 10m."
)
@options.json()
def check(name: str, *, job: bool, timeout: str, as_json: bool) -> int:
    """Check the engine NAME: its commands, its partition or queue, its hosts, and a one-node test job.

    The job goes the way of `muster run --on NAME`, asks for 5 minutes and takes seconds. It tells
    node, processor, Python and torch there, and whether the folders are seen.
    """
    from torchmuster.core.spec.problems import parse_timeout
    from torchmuster.launcher.cli.sites import my_sites

    timeout_s = parse_timeout(timeout)
    if not timeout_s:
        raise UsageError(
            f"`{timeout}` is not a valid duration", where="--timeout", fix="--timeout 10m"
        )
    site = my_sites().get(name)
    return show_check(site, shutil.which, timeout_s if job else None, as_json=as_json)


def show_engines(sites: "Sites", which: "Which", *, as_json: bool) -> int:
    """Print all engines."""
    from torchmuster.launcher.jobs.detect import client_of, find_tool

    clients = dict.fromkeys(filter(None, (client_of(site.kind) for site in sites.sites.values())))
    tools = {name: find_tool(name, which) for name in clients}
    job = _own_job()
    rows = [_row(site, tools) for site in sites.sites.values()]
    if as_json:
        plain = {
            "engines": rows,
            "default": sites.default_on or "local",
            "inside_job": job,
            "files": list(sites.files),
        }
        click.echo(json.dumps(plain, indent=1))
        return 0
    from torchmuster.launcher.ui.table import render_table

    cells = [[row["name"], row["kind"], row["configured"], row["here"]] for row in rows]
    click.echo(render_table(["NAME", "KIND", "CONFIGURED", "HERE"], cells), nl=False)
    click.echo(f"\nwithout --on: {sites.default_on or 'local'}")
    if job is not None:
        click.echo(f"inside job {job['id']} of {job['kind']}")
    if not sites.files:
        click.echo("no muster.toml here or above, none of yours: muster init writes one")
    return 0


def show_check(site: "Site", which: "Which", job_timeout_s: float | None, *, as_json: bool) -> int:
    """Print what was found of one engine; return 14 if something is missing, else 0.

    `job_timeout_s` limits its test job, in seconds from the submission; None submits none.
    """
    checks, place = look_at(site, which)
    note = _NOT_TRIED
    if any(entry["ok"] is False for entry in checks) or place is None:
        note = f"no test job until this is fixed: {_NOT_TRIED}"
    elif job_timeout_s is not None and (tried := place.try_out(job_timeout_s)) is not None:
        checks += tried[0]
        note = tried[1]
    bad = [entry for entry in checks if entry["ok"] is False]
    if as_json:
        plain = {"name": site.name, "kind": site.kind, "checks": checks, "note": note}
        click.echo(json.dumps(plain, indent=1))
        return _REFUSED if bad else 0
    from torchmuster.launcher.ui.table import render_table

    words = {True: "ok", False: "FAILED", None: "-"}
    rows = [[entry["check"], words[entry["ok"]], entry["found"]] for entry in checks]
    click.echo(f"{site.name}: {site.kind}, {site.origin}\n")
    click.echo(render_table(["CHECK", "", "FOUND"], rows), nl=False)
    click.echo(f"\n{note}")
    return _REFUSED if bad else 0


def look_at(site: "Site", which: "Which") -> tuple[list[dict[str, Any]], "Place | None"]:
    """Return the checked rows (ok None: unknown), and the place for runs if it can be one."""
    from torchmuster.core.cli.find import Where, find_place
    from torchmuster.core.spec.problems import Problems
    from torchmuster.errors import ManyErrors, MusterError
    from torchmuster.launcher.jobs.detect import find_tool, tools_of

    tools = [find_tool(name, which) for name in tools_of(site.kind)]
    checks = [row(tool.name, ok=tool.path is not None, found=_say_tool(tool)) for tool in tools]
    if any(tool.path is None for tool in tools):
        return [*checks, row("to install", ok=None, found=_install(site.kind))], None
    try:
        place = find_place(Where(engine=site.name, here=True), Problems())
    except (MusterError, ManyErrors) as error:
        errors = error.errors if isinstance(error, ManyErrors) else [error]
        lines = [": ".join(filter(None, (one.where, one.what))) for one in errors]
        return [*checks, row("section", ok=False, found="; ".join(lines[:5]))], None
    if place.needs_commands and not tools:
        checks.append(row("commands", ok=None, found=f"{_install(site.kind)}: not looked for"))
    return [*checks, *place.look()], place


def _row(site: "Site", tools: "dict[str, Tool]") -> dict[str, Any]:
    from torchmuster.launcher.jobs.detect import client_of

    client = client_of(site.kind)
    tool = tools[client] if client is not None else None
    here = _say_tool(tool) if tool is not None else "this machine"
    if tool is None and site.kind != "local":
        here = "not looked for"
    return {
        "name": site.name,
        "kind": site.kind,
        "configured": site.origin,
        "here": here,
        "found": tool is None or tool.path is not None,
    }


def _say_tool(tool: "Tool") -> str:
    if tool.path is None:
        return f"no {tool.name} on PATH"
    detail = tool.version or tool.problem
    return f"{tool.path}: {detail}" if detail else tool.path


def _install(kind: str) -> str:
    from torchmuster.launcher.engines.registry import schedulers

    if kind == "ssh":
        return "OpenSSH (Debian: openssh-client)"
    entry = schedulers().get(kind)
    return entry.install if entry is not None else kind


def _own_job() -> dict[str, str] | None:
    from torchmuster.launcher.engines.registry import find_job_id

    job = find_job_id(os.environ)
    return {"kind": job[0], "id": job[1]} if job is not None else None
