"""`muster prune`."""

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.messages import print_errors
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.text import show_size
from torchmuster.core.spec.problems import parse_size, parse_timeout
from torchmuster.errors import ManyErrors, UsageError
from torchmuster.launcher.cli import sites
from torchmuster.launcher.ui.table import render_table
from torchmuster.launcher.views.prune import PrunePlan, Removal, plan_prune, remove

if TYPE_CHECKING:
    from torchmuster.launcher.engines.ssh_command import HostProblem
    from torchmuster.launcher.engines.ssh_host import RemoteHost


# `muster prune --hosts`: the environments that were sent to ssh hosts.


@dataclass(frozen=True, slots=True)
class PrunedHost:
    """What was removed on a host, or would be."""

    host: str
    paths: tuple[str, ...]
    size_bytes: int


def prune_hosts(
    hosts: str, older_s: float, most_bytes: int | None, *, dry_run: bool
) -> list[PrunedHost]:
    """Remove unused environments on hosts, or list them.

    Args:
        hosts: A list as for `--hosts`, or the name of an ssh site.
        older_s: Remove those that were unused for this time, in seconds.
        most_bytes: Also remove the oldest beyond this total size.
        dry_run: Remove nothing.

    Raises:
        ManyErrors: Some hosts can't be used; all others were asked.
    """
    from torchmuster.launcher.engines.ssh_command import HostProblem
    from torchmuster.launcher.engines.ssh_host import HostError, RemoteHost, in_parallel
    from torchmuster.launcher.net.remote_messages import EnvironmentsPruned, PruneEnvironments

    is_site = hosts in sites.my_sites().sites
    site = sites.find_ssh_site(hosts if is_site else sites.KIND, None if is_site else hosts, None)
    if site is None:
        raise UsageError(f"`{hosts}` is no site of kind ssh", where="--hosts")
    wishes = sites.make_wishes(site, by_slots=False)
    bundle = sites.make_bundle_for((sys.executable,), wishes)
    question = PruneEnvironments(
        older_s=older_s, most_bytes=most_bytes, dry_run=dry_run, scratch=site.scratch
    )

    def ask(host: "RemoteHost") -> "PrunedHost | HostProblem":
        try:
            host.open()
            said = host.ask(question, EnvironmentsPruned)
        except HostError as error:
            return error.problem
        finally:
            host.close()
        return PrunedHost(host.host.name, said.paths, said.size_bytes)

    with tempfile.TemporaryDirectory(prefix="muster-prune-") as folder:
        sessions = [RemoteHost(one, bundle, RunDir(folder)) for one in wishes.hosts]
        answers = in_parallel(ask, sessions)
    bad = [answer for answer in answers if isinstance(answer, HostProblem)]
    if bad:
        what = "a host can't be asked"
        raise ManyErrors([UsageError(what, where=b.host, why=b.words, fix=b.fix) for b in bad])
    return [answer for answer in answers if isinstance(answer, PrunedHost)]


_DAY_S = 86400.0
_MAX_ROWS = 40


@click.command()
@click.option(
    "--older",
    default="30d",
    metavar="TIME",
    help="Runs that ended at least this long ago; default 30d.",
)
@click.option(
    "--keep-last-snapshot",
    is_flag=True,
    help="Keep each run's record and its newest good snapshot.",
)
@click.option("--linked", is_flag=True, help="Also runs whose snapshots another run uses.")
@click.option(
    "--environments",
    metavar="SIZE",
    help="Of environments of --ship-env, also the oldest beyond this size: 20Gi.",
)
@click.option(
    "--hosts",
    metavar="HOST,...",
    help="Environments on these hosts of ssh, or of a site; nothing here.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.json("As JSON; implies --yes.")
def prune(**given: Any) -> int:
    """Remove old runs that have ended, cached zipapps and environments; keep what is running or in use.

    \b
    muster prune --dry-run
    muster prune --older 7d --keep-last-snapshot
    muster prune --hosts a,b --older 7d --environments 20Gi
    """  # noqa: D301 - \b is click's mark
    older_s = parse_timeout(given["older"])
    if older_s is None:
        what = f"`{given['older']}` is not a valid duration"
        raise UsageError(what, where="--older", fix="--older 30d, 12h or 0s")
    size = given["environments"]
    most_bytes = parse_size(size) if size is not None else None
    if size is not None and most_bytes is None:
        what, fix = f"`{size}` is not a valid size", "--environments 20Gi, or 0 for none"
        raise UsageError(what, where="--environments", fix=fix)
    if given["hosts"] is not None:
        return _on_hosts(given, older_s, most_bytes)
    plan = plan_prune(
        older_s,
        time.time(),
        most_bytes=most_bytes,
        keep_last_snapshot=given["keep_last_snapshot"],
        with_linked=given["linked"],
    )
    if given["as_json"]:
        return _as_json(plan, dry_run=given["dry_run"])
    _show(plan)
    if not plan.removals:
        click.echo("nothing to remove", err=True)
        return 0
    if given["dry_run"]:
        click.echo("nothing was removed (--dry-run)", err=True)
        return 0
    if not given["yes"] and sys.stdin.isatty() and not click.confirm("remove it?"):
        click.echo("nothing was removed", err=True)
        return 0
    freed, problems = _remove_all(plan)
    print_errors(problems)
    click.echo(f"freed {show_size(freed)}", err=True)
    return 3 if problems else 0


def _on_hosts(given: dict[str, Any], older_s: float, most_bytes: int | None) -> int:
    asks = not (given["yes"] or given["as_json"] or given["dry_run"]) and sys.stdin.isatty()
    found = prune_hosts(given["hosts"], older_s, most_bytes, dry_run=given["dry_run"] or asks)
    if given["as_json"]:
        click.echo(json.dumps([asdict(one) for one in found], indent=1))
        return 0
    size = sum(one.size_bytes for one in found)
    for one in found:
        for path in one.paths:
            click.echo(f"{one.host}: {path}")
    if asks and size and click.confirm(f"remove them, {show_size(size)}?"):
        found = prune_hosts(given["hosts"], older_s, most_bytes, dry_run=False)
        size, asks = sum(one.size_bytes for one in found), False
    if not size:
        click.echo("nothing to remove", err=True)
    elif given["dry_run"] or asks:
        click.echo(f"nothing was removed; {show_size(size)} can be", err=True)
    else:
        click.echo(f"freed {show_size(size)}", err=True)
    return 0


def _remove_all(plan: "PrunePlan") -> tuple[int, list[Any]]:
    from torchmuster.errors import MusterError

    freed, problems = 0, []
    for removal in plan.removals:
        try:
            remove(removal)
            freed += removal.size_bytes
        except MusterError as error:
            problems.append(error)
    return freed, problems


def _as_json(plan: "PrunePlan", *, dry_run: bool) -> int:
    plain: dict[str, Any] = {
        "removals": [
            {"name": r.name, "size_bytes": r.size_bytes, "whole": r.is_whole, "paths": r.paths}
            for r in plan.removals
        ],
        "kept": plan.kept,
        "freed_bytes": 0,
    }
    problems: list[Any] = []
    if not dry_run:
        plain["freed_bytes"], problems = _remove_all(plan)
    click.echo(json.dumps(plain, indent=1))
    print_errors(problems)
    return 3 if problems else 0


def _show(plan: "PrunePlan") -> None:

    rows = [_row(removal) for removal in plan.removals]
    if rows:
        header = ["RUN", "ENDED", "FREES", "WHAT"]
        click.echo(render_table(header, rows[:_MAX_ROWS]), nl=False)
        more = f", {len(rows) - _MAX_ROWS} more not shown" if len(rows) > _MAX_ROWS else ""
        click.echo(f"\n{len(rows)} to remove, {show_size(plan.size_bytes)}{more}")
    for sentence in plan.kept[:_MAX_ROWS]:
        click.echo(f"kept {sentence}", err=True)


def _row(removal: "Removal") -> list[str]:
    what = "the whole run" if removal.is_whole else f"{len(removal.paths)} files and folders"
    ended = f"{removal.age_s / _DAY_S:.0f} days ago" if removal.age_s else "-"
    return [removal.name, ended, show_size(removal.size_bytes), what]
