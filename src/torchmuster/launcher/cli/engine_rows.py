"""Rows of `muster engines check`: a scheduler's queues and accounts, and its hosts' answers."""

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchmuster.core.cli.place import row
from torchmuster.core.model.text import few_of

if TYPE_CHECKING:
    from torchmuster.launcher.engines.ssh_command import SshHost
    from torchmuster.launcher.jobs.detect import QueueList
    from torchmuster.launcher.spec.site import Site


def queue_rows(site: "Site") -> list[dict[str, Any]]:
    """Return rows about a scheduler's queues and the user's accounts."""
    return [*_check_queues(site), *_check_account(site)]


def _check_account(site: "Site") -> list[dict[str, Any]]:
    from torchmuster.core.model.text import did_you_mean
    from torchmuster.launcher.jobs.detect import list_accounts, lists_accounts

    if not lists_accounts(site.kind):
        said = [] if site.account is None else [site.account]
        return [row("account", ok=None, found=f"{name}, not looked for") for name in said]
    accounts, problem = list_accounts(site.kind, shutil.which)
    if site.account is None:
        listed = ", ".join(accounts)
        return [row("accounts", ok=None, found=listed)] if listed else []
    if not accounts:
        why = problem or "this cluster keeps none"
        return [row(f"account {site.account}", ok=None, found=f"not looked for: {why}")]
    ok = site.account in accounts
    hint = did_you_mean(site.account, accounts, f"yours: {few_of(accounts, 8)}")
    return [row(f"account {site.account}", ok=ok, found="yours" if ok else f"not yours: {hint}")]


def _check_queues(site: "Site") -> list[dict[str, Any]]:
    from torchmuster.launcher.engines.registry import schedulers
    from torchmuster.launcher.jobs.detect import list_queues

    found = list_queues(site.kind)
    word = schedulers()[site.kind].queue_word
    named = ", ".join(_say_queue(queue) for queue in found.queues)
    checks = []
    if found.problem is not None or named:
        listed = found.problem if found.problem is not None else named
        checks.append(row(f"{word}s", ok=found.problem is None, found=listed))
    if site.queue_name is not None and found.problem is None and found.queues:
        checks.append(_check_queue(site.queue_name, word, found))
    return checks


def _check_queue(name: str, word: str, found: "QueueList") -> dict[str, Any]:
    """Check that the site's partition exists and is open; Slurm accepts several, with commas."""
    from torchmuster.core.model.text import did_you_mean

    known = {queue.name: queue for queue in found.queues}
    for part in name.split(","):
        bare = part if part in known else part.partition("@")[0]
        if bare not in known:
            hint = did_you_mean(bare, known, "it is none of these")
            return row(f"{word} {name}", ok=False, found=f"there is no `{bare}`: {hint}")
        if not known[bare].is_open:
            return row(f"{word} {name}", ok=False, found=f"`{bare}` takes no jobs now")
    return row(
        f"{word} {name}",
        ok=True,
        found="; ".join(known[n].about for n in known if n in name.split(",")),
    )


def host_rows(hosts: "Sequence[SshHost]") -> list[dict[str, Any]]:
    """Return a row with the hosts of a site."""
    slots = [f"{host.name} ({host.slots or '?'} slots)" for host in hosts]
    return [row("hosts", ok=True, found=few_of(slots, 8))]


def reach_rows(hosts: "Sequence[SshHost]") -> list[dict[str, Any]]:
    """Contact hosts; return a row with each one's answer."""
    from torchmuster.launcher.jobs.reach import reach_hosts

    found = reach_hosts(hosts)
    return [row(f"host {one.host}", ok=one.is_here, found=one.words) for one in found]


def _say_queue(queue: Any) -> str:
    marks = [
        mark for mark, on in (("default", queue.is_default), ("closed", not queue.is_open)) if on
    ]
    return f"{queue.name} ({', '.join(marks)})" if marks else str(queue.name)
