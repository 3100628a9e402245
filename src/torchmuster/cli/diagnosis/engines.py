"""`muster engines`: where runs can go from here, and what was found of it."""

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import click

from torchmuster.cli import options
from torchmuster.errors import UsageError
from torchmuster.model.display.text import few_of

if TYPE_CHECKING:
    from torchmuster.owner.jobs.detect import QueueList, Tool, Which
    from torchmuster.spec.sites.site import Site, Sites

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
    from torchmuster.cli.sites import my_sites

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

    The job goes the way of `muster run --on NAME`, asks for 5 minutes and takes seconds. It tells node, processor,
    Python and torch there, and whether the folders are seen.
    """
    from torchmuster.cli.sites import my_sites
    from torchmuster.spec.units import parse_timeout

    timeout_s = parse_timeout(timeout)
    if not timeout_s:
        raise UsageError(
            f"`{timeout}` is not a valid duration", where="--timeout", fix="--timeout 10m"
        )
    site = my_sites().get(name)
    return show_check(site, shutil.which, timeout_s if job else None, as_json=as_json)


def show_engines(sites: "Sites", which: "Which", *, as_json: bool) -> int:
    """Print all engines."""
    from torchmuster.owner.jobs.detect import client_of, find_tool

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
    from torchmuster.ui.table import render_table

    cells = [[row["name"], row["kind"], row["configured"], row["here"]] for row in rows]
    click.echo(render_table(["NAME", "KIND", "CONFIGURED", "HERE"], cells), nl=False)
    click.echo(f"\nwithout --on: {sites.default_on or 'local'}")
    if job is not None:
        click.echo(f"inside job {job['id']} of {job['kind']}")
    if not sites.files:
        click.echo("no muster.toml here or above, none of yours: muster init writes one")
    return 0


def show_check(site: "Site", which: "Which", job_timeout_s: float | None, *, as_json: bool) -> int:
    """Print what was found of one engine; the exit code is 14 when something is missing.

    `job_timeout_s` is the limit of its test job, in seconds from the submission; None submits none.
    """
    checks = run_checks(site, which)
    note = _NOT_TRIED
    if any(entry["ok"] is False for entry in checks):
        note = f"no test job until this is fixed: {_NOT_TRIED}"
    elif job_timeout_s is not None and _is_cluster(site):
        from torchmuster.cli.diagnosis.engine_pods import try_pods

        checks += try_pods(site, job_timeout_s)
        note = (
            "nothing is left on the cluster; the run's files stay here: muster prune removes them"
        )
    elif job_timeout_s is not None and site.is_batch:
        from torchmuster.cli.diagnosis.engine_job import try_job

        checks += try_job(site, job_timeout_s)
        note = "the test job's files stay: muster prune removes them"
    elif job_timeout_s is not None and site.kind == "ssh":
        checks += _reach(site)
        note = "each host was contacted, nothing was started there"
    bad = [entry for entry in checks if entry["ok"] is False]
    if as_json:
        plain = {"name": site.name, "kind": site.kind, "checks": checks, "note": note}
        click.echo(json.dumps(plain, indent=1))
        return _REFUSED if bad else 0
    from torchmuster.ui.table import render_table

    words = {True: "ok", False: "FAILED", None: "-"}
    rows = [[entry["check"], words[entry["ok"]], entry["found"]] for entry in checks]
    click.echo(f"{site.name}: {site.kind}, {site.origin}\n")
    click.echo(render_table(["CHECK", "", "FOUND"], rows), nl=False)
    click.echo(f"\n{note}")
    return _REFUSED if bad else 0


def run_checks(site: "Site", which: "Which") -> list[dict[str, Any]]:
    """Return what was looked at: check, ok (None where nobody can tell), found."""
    from torchmuster.owner.jobs.detect import find_tool, tools_of

    if site.kind == "local":
        return [_entry("this machine", ok=True, found=f"{os.cpu_count()} CPUs")]
    names = tools_of(site.kind)
    tools = [find_tool(name, which) for name in names]
    checks = [_entry(tool.name, ok=tool.path is not None, found=_say_tool(tool)) for tool in tools]
    if not names:
        checks.append(_entry("commands", ok=None, found=f"{_install(site.kind)}: not looked for"))
    if any(tool.path is None for tool in tools):
        checks.append(_entry("to install", ok=None, found=_install(site.kind)))
        return checks
    if site.kind == "ssh":
        return [*checks, _check_hosts(site)]
    if _is_cluster(site):
        from torchmuster.cli.diagnosis.engine_pods import cluster_rows

        return [*checks, *cluster_rows(site)]
    return [*checks, *_check_queues(site), *_check_account(site)]


def _is_cluster(site: "Site") -> bool:
    """Say whether a site's jobs are objects of a cluster's API."""
    from torchmuster.engines.base import object_dialect
    from torchmuster.engines.registry import load_dialect

    return site.is_batch and object_dialect(load_dialect(site.kind)) is not None


def _check_account(site: "Site") -> list[dict[str, Any]]:
    from torchmuster.model.display.text import did_you_mean
    from torchmuster.owner.jobs.detect import list_accounts, lists_accounts

    if not lists_accounts(site.kind):
        said = [] if site.account is None else [site.account]
        return [_entry("account", ok=None, found=f"{name}, not looked for") for name in said]
    accounts, problem = list_accounts(site.kind, shutil.which)
    if site.account is None:
        listed = ", ".join(accounts)
        return [_entry("accounts", ok=None, found=listed)] if listed else []
    if not accounts:
        why = problem or "this cluster keeps none"
        return [_entry(f"account {site.account}", ok=None, found=f"not looked for: {why}")]
    ok = site.account in accounts
    hint = did_you_mean(site.account, accounts, f"yours: {few_of(accounts, 8)}")
    return [_entry(f"account {site.account}", ok=ok, found="yours" if ok else f"not yours: {hint}")]


def _check_queues(site: "Site") -> list[dict[str, Any]]:
    from torchmuster.engines.registry import schedulers
    from torchmuster.owner.jobs.detect import list_queues

    found = list_queues(site.kind)
    word = schedulers()[site.kind].queue_word
    named = ", ".join(_say_queue(queue) for queue in found.queues)
    checks = []
    if found.problem is not None or named:
        listed = found.problem if found.problem is not None else named
        checks.append(_entry(f"{word}s", ok=found.problem is None, found=listed))
    if site.queue_name is not None and found.problem is None and found.queues:
        checks.append(_check_queue(site.queue_name, word, found))
    return checks


def _check_queue(name: str, word: str, found: "QueueList") -> dict[str, Any]:
    """Say whether the site's own partition is there; Slurm takes several with commas."""
    from torchmuster.model.display.text import did_you_mean

    known = {queue.name: queue for queue in found.queues}
    for part in name.split(","):
        bare = part if part in known else part.partition("@")[0]
        if bare not in known:
            hint = did_you_mean(bare, known, "it is none of these")
            return _entry(f"{word} {name}", ok=False, found=f"there is no `{bare}`: {hint}")
        if not known[bare].is_open:
            return _entry(f"{word} {name}", ok=False, found=f"`{bare}` takes no jobs now")
    return _entry(
        f"{word} {name}",
        ok=True,
        found="; ".join(known[n].about for n in known if n in name.split(",")),
    )


def _check_hosts(site: "Site") -> dict[str, Any]:
    from torchmuster.errors import ManyErrors
    from torchmuster.spec.sites.site import site_hosts

    try:
        hosts = site_hosts(site)
    except ManyErrors as many:
        lines = [": ".join(filter(None, (error.where, error.what))) for error in many.errors]
        return _entry("hosts", ok=False, found="; ".join(lines[:5]))
    slots = [f"{host.name} ({host.slots or '?'} slots)" for host in hosts]
    return _entry("hosts", ok=True, found=few_of(slots, 8))


def _reach(site: "Site") -> list[dict[str, Any]]:
    from torchmuster.cli.runs.ssh import make_wishes
    from torchmuster.owner.jobs.reach import reach_hosts

    found = reach_hosts(make_wishes(site, by_slots=False).hosts)
    return [_entry(f"host {one.host}", ok=one.is_here, found=one.words) for one in found]


def _row(site: "Site", tools: "dict[str, Tool]") -> dict[str, Any]:
    from torchmuster.owner.jobs.detect import client_of

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


def _say_queue(queue: Any) -> str:
    marks = [
        mark for mark, on in (("default", queue.is_default), ("closed", not queue.is_open)) if on
    ]
    return f"{queue.name} ({', '.join(marks)})" if marks else str(queue.name)


def _install(kind: str) -> str:
    from torchmuster.engines.registry import schedulers

    if kind == "ssh":
        return "OpenSSH (Debian: openssh-client)"
    entry = schedulers().get(kind)
    return entry.install if entry is not None else kind


def _own_job() -> dict[str, str] | None:
    from torchmuster.engines.registry import find_job_id

    job = find_job_id(os.environ)
    return {"kind": job[0], "id": job[1]} if job is not None else None


def _entry(check: str, *, ok: bool | None, found: str) -> dict[str, Any]:
    return {"check": check, "ok": ok, "found": found}
