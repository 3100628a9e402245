"""`muster engines` and `muster init`: where runs can go from here, as schedulers' commands say."""

import json
import os
import platform
import pwd
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core import proc
from torchmuster.core.cli import options
from torchmuster.core.cli.find import Where, find_place
from torchmuster.core.cli.place import row
from torchmuster.core.model.text import did_you_mean, few_of
from torchmuster.core.spec.problems import Problems, parse_timeout
from torchmuster.errors import ManyErrors, MusterError, UsageError
from torchmuster.launcher.cli.sites import my_sites
from torchmuster.launcher.engines.base import AccountQuestion, Queue, QueueQuestion
from torchmuster.launcher.engines.registry import find_job_id, load_dialect, schedulers
from torchmuster.launcher.engines.schedulers import CLIENTS, SCHEDULERS, kind_of_client
from torchmuster.launcher.engines.ssh_command import (
    CONNECT_LIMIT_S,
    SshHost,
    session_argv,
    ssh_command,
)
from torchmuster.launcher.model.scheduler import REMOVED_ENGINES
from torchmuster.launcher.ui.table import render_table
from torchmuster.launcher.views.elsewhere import elsewhere

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Place
    from torchmuster.launcher.spec.site import Site

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
    sites = my_sites()
    clients = dict.fromkeys(filter(None, (client_of(site.kind) for site in sites.sites.values())))
    tools = {name: find_tool(name, shutil.which) for name in clients}
    job = find_job_id(os.environ)
    rows = [_row(site, tools) for site in sites.sites.values()]
    if as_json:
        plain = {
            "engines": rows,
            "default": sites.default_on or "local",
            "inside_job": {"kind": job[0], "id": job[1]} if job is not None else None,
            "files": list(sites.files),
        }
        click.echo(json.dumps(plain, indent=1))
        return 0
    cells = [[row["name"], row["kind"], row["configured"], row["here"]] for row in rows]
    click.echo(render_table(["NAME", "KIND", "CONFIGURED", "HERE"], cells), nl=False)
    click.echo(f"\nwithout --on: {sites.default_on or 'local'}")
    if job is not None:
        click.echo(f"inside job {job[1]} of {job[0]}")
    if not sites.files:
        click.echo("no muster.toml here or above, none of yours: muster init writes one")
    return 0


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
    timeout_s = parse_timeout(timeout)
    if not timeout_s:
        raise UsageError(
            f"`{timeout}` is not a valid duration", where="--timeout", fix="--timeout 10m"
        )
    site = my_sites().get(name)
    checks, place = _look_at(site)
    note = _NOT_TRIED
    if any(entry["ok"] is False for entry in checks) or place is None:
        note = f"no test job until this is fixed: {_NOT_TRIED}"
    elif job and (tried := place.try_out(timeout_s)) is not None:
        checks += tried[0]
        note = tried[1]
    bad = [entry for entry in checks if entry["ok"] is False]
    if as_json:
        plain = {"name": site.name, "kind": site.kind, "checks": checks, "note": note}
        click.echo(json.dumps(plain, indent=1))
        return _REFUSED if bad else 0
    words = {True: "ok", False: "FAILED", None: "-"}
    rows = [[entry["check"], words[entry["ok"]], entry["found"]] for entry in checks]
    click.echo(f"{site.name}: {site.kind}, {site.origin}\n")
    click.echo(render_table(["CHECK", "", "FOUND"], rows), nl=False)
    click.echo(f"\n{note}")
    return _REFUSED if bad else 0


def _look_at(site: "Site") -> tuple[list[dict[str, Any]], "Place | None"]:
    """Return the checked rows (ok None: unknown), and the place for runs if it can be one."""
    tools = [find_tool(name, shutil.which) for name in tools_of(site.kind)]
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
    if kind == "ssh":
        return "OpenSSH (Debian: openssh-client)"
    entry = schedulers().get(kind)
    return entry.install if entry is not None else kind


# Rows of `muster engines check`: queues and accounts of a scheduler, and the answers of hosts.


def queue_rows(site: "Site") -> list[dict[str, Any]]:
    """Return rows about a scheduler's queues and the user's accounts."""
    found = list_queues(site.kind)
    word = schedulers()[site.kind].queue_word
    checks = []
    if found.problem is not None or found.queues:
        listed = found.problem or ", ".join(_say_queue(queue) for queue in found.queues)
        checks.append(row(f"{word}s", ok=found.problem is None, found=listed))
    if site.queue_name is not None and found.problem is None and found.queues:
        checks.append(_check_queue(site.queue_name, word, found))
    return [*checks, *_check_account(site)]


def _check_account(site: "Site") -> list[dict[str, Any]]:
    question: AccountQuestion | None = _asked_by(site.kind, "accounts")
    if question is None:
        said = [] if site.account is None else [site.account]
        return [row("account", ok=None, found=f"{name}, not looked for") for name in said]
    argv = question.argv_for(pwd.getpwuid(os.getuid()).pw_name)
    is_there = shutil.which(argv[0]) is not None
    text, problem = _answer(argv, ask) if is_there else ("", f"no {argv[0]} on PATH")
    accounts = question.parse(text)
    if site.account is None:
        listed = ", ".join(accounts)
        return [row("accounts", ok=None, found=listed)] if listed else []
    if not accounts:
        why = problem or "this cluster keeps none"
        return [row(f"account {site.account}", ok=None, found=f"not looked for: {why}")]
    ok = site.account in accounts
    hint = did_you_mean(site.account, accounts, f"yours: {few_of(accounts, 8)}")
    return [row(f"account {site.account}", ok=ok, found="yours" if ok else f"not yours: {hint}")]


def _check_queue(name: str, word: str, found: "QueueList") -> dict[str, Any]:
    """Check that the site's partition exists and is open; Slurm accepts several, with commas."""
    known = {queue.name: queue for queue in found.queues}
    for part in name.split(","):
        bare = part if part in known else part.partition("@")[0]
        if bare not in known:
            hint = did_you_mean(bare, known, "it is none of these")
            return row(f"{word} {name}", ok=False, found=f"there is no `{bare}`: {hint}")
        if not known[bare].is_open:
            return row(f"{word} {name}", ok=False, found=f"`{bare}` takes no jobs now")
    about = "; ".join(known[n].about for n in known if n in name.split(","))
    return row(f"{word} {name}", ok=True, found=about)


def host_rows(hosts: Sequence[SshHost]) -> list[dict[str, Any]]:
    """Return a row with the hosts of a site."""
    slots = [f"{host.name} ({host.slots or '?'} slots)" for host in hosts]
    return [row("hosts", ok=True, found=few_of(slots, 8))]


def _say_queue(queue: Any) -> str:
    marks = [*["default"] * queue.is_default, *["closed"] * (not queue.is_open)]
    return f"{queue.name} ({', '.join(marks)})" if marks else str(queue.name)


# What is found on this machine: commands, versions, partitions and queues. Each command has a time
# limit; one that hangs or fails is a finding, not an error.

TIMEOUT_S = 5.0
Ask = Callable[[Sequence[str]], proc.CommandOutput]
Which = Callable[[str], str | None]
_SSH = "ssh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A command of a scheduler.

    Attributes:
        path: Where it is; None if it is not on PATH.
        version: The version that it prints; None if unknown.
        problem: Why there is no version.
    """

    name: str
    path: str | None
    version: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueList:
    """The queues that were found; `problem` says why some may be missing."""

    queues: tuple[Queue, ...] = ()
    problem: str | None = None


def ask(argv: Sequence[str]) -> proc.CommandOutput:
    """Run a scheduler's command for at most `TIMEOUT_S`.

    Raises:
        MusterError: The command can't be executed.
    """
    return proc.ask(argv, b"", TIMEOUT_S)


def client_of(kind: str) -> str | None:
    """Return the command whose presence indicates this kind of engine; None if there is none."""
    return _SSH if kind == _SSH else schedulers()[kind].client if kind in schedulers() else None


def tools_of(kind: str) -> tuple[str, ...]:
    """Return all commands that a run on this kind of engine needs on this machine."""
    entry = schedulers().get(kind)  # none for `local`, which needs no command
    return (_SSH,) if kind == _SSH else tuple(entry.tools) if entry is not None else ()


def find_tool(name: str, which: Which, asking: Ask = ask) -> Tool:
    """Look up a command; ask its version if it has a known option for it."""
    path = which(name)
    if path is None or name not in (*CLIENTS, _SSH):
        return Tool(name=name, path=path)
    text, problem = _answer((name, "-V" if name == _SSH else "--version"), asking, both=True)
    version = parse_version(text)
    if version is None and problem is None:
        problem = "it printed no version"
    return Tool(name=name, path=path, version=version, problem=None if version else problem)


def parse_version(text: str) -> str | None:
    """Parse the version from the output of `sbatch --version`, `qsub --version` or `ssh -V`."""
    match = re.search(r"OpenSSH_[\w.]+|\d+(?:\.\w+)+", text)
    return match[0] if match else None


def list_queues(kind: str, asking: Ask = ask) -> QueueList:
    """Return the partitions or queues of a scheduler; none for engines of other kinds."""
    question: QueueQuestion | None = _asked_by(kind, "queues")
    if question is None:
        return QueueList()
    text, problem = _answer(question.argv, asking)
    queues = question.parse(text)
    if queues and question.default_argv is not None:
        queues = question.mark_default(queues, _answer(question.default_argv, asking)[0])
    if not queues and problem is None:
        problem = f"`{' '.join(question.argv)}` listed none"
    return QueueList(queues=queues, problem=problem)


def _asked_by(kind: str, what: str) -> Any:
    """Return the dialect's question for `what`; None if it has none, or is no scheduler's."""
    return None if kind in ("local", _SSH) else getattr(load_dialect(kind), what, None)


def _answer(argv: Sequence[str], asking: Ask, *, both: bool = False) -> tuple[str, str | None]:
    """Return what a command printed, and its problem, if any."""
    try:
        said = asking(argv)
    except MusterError as error:
        return "", error.why or error.what
    out = said.stdout.decode(errors="replace")
    err = said.stderr.decode(errors="replace")
    text = f"{out}\n{err}" if both else out
    if said.status is None:
        return text, f"`{' '.join(argv)}` did not answer within {TIMEOUT_S:g} s"
    if said.status:
        last = (err.strip() or out.strip() or f"exit code {said.status}").splitlines()[-1]
        return text, f"`{' '.join(argv)}`: {last[:200]}"
    return text, None


_AT_ONCE = 32
_MARK = "torchmuster-reached"
# The host's shell may print anything before the mark.
_COMMAND = f"echo {_MARK}; uname -m; python3 -V"


def ask_host(argv: Sequence[str]) -> proc.CommandOutput:
    """Run ssh for at most 10 s.

    Raises:
        MusterError: ssh can't be executed.
    """
    return proc.ask(argv, b"", CONNECT_LIMIT_S)


def reach_hosts(hosts: Sequence[SshHost], asking: Ask = ask_host) -> list[dict[str, Any]]:
    """Return a row with each host's answer, awaited for 10 s; nothing is started or left there."""
    if not hosts:
        return []
    ssh = ssh_command(os.environ)
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(lambda host: _reach(ssh, host, asking), hosts))


def _reach(ssh: Sequence[str], host: SshHost, asking: Ask) -> dict[str, Any]:
    try:
        ok, words = _outcome(asking(session_argv(ssh, host, _COMMAND)))
    except (MusterError, ValueError) as error:
        ok, words = False, str(error)
    return row(f"host {host.name}", ok=ok, found=words)


def _outcome(said: proc.CommandOutput) -> tuple[bool, str]:
    """Return whether a host answered, and its description or the problem."""
    lines = said.stdout.decode(errors="replace").splitlines()
    errors = [line for line in said.stderr.decode(errors="replace").splitlines() if line.strip()]
    if said.status is None:
        return False, f"it did not answer within {CONNECT_LIMIT_S:g} s"
    if _MARK not in lines:
        return False, errors[-1].strip()[:200] if errors else f"ssh ended with {said.status}"
    after = lines[lines.index(_MARK) + 1 :]
    machine = after[0].strip() if after else "processor not told"
    python = after[1].strip() if len(after) > 1 else "no python3 on PATH"
    other = f", here {platform.machine()}" if machine != platform.machine() else ""
    return True, f"{machine}{other}, {python}"


# A first `muster.toml`.

_MAX_LISTED = 50
_HEAD = """\
# Where `muster run --on NAME` and `muster submit --on NAME` send their work.
# Lines with a # in front are examples. `muster engines check NAME` looks at one engine.
"""
_SSH_EXAMPLE = """
# Hosts that you reach by ssh without a password:
# [engines.hosts]
# kind = "ssh"
# hosts = ["node1 slots=4", "node2 slots=4"]
"""
_REST = """\
# account = "NAME"
# time = "2h"
# directives = ["{directive}"]
# setup = ["module load NAME", "source venv/bin/activate"]
"""
_DEFAULTS = """
[defaults]
# on = "{name}"   # what is used without --on
"""


@click.command()
def init() -> int:
    """Write a first muster.toml into this folder, from what is found here, and print it.

    The scheduler is asked for its partitions or queues; accounts and modules are not guessed. A
    file that exists already is not changed.
    """
    path = os.path.abspath("muster.toml")
    if os.path.lexists(path):
        raise _refusal(path)
    text = _first_file()
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _refusal(path) from None
    except OSError as error:
        raise MusterError("the file can't be written", where=path, why=error.strerror) from error
    click.echo(text, nl=False)
    click.echo(f"muster: {path} is written", err=True)
    return 0


def _first_file() -> str:
    """Return the text of a first `muster.toml`, which `load_sites` can read."""
    which = shutil.which
    names = [
        kind_of_client(client, find_tool(client, which).version)
        for client in CLIENTS
        if which(client) is not None
    ]
    others = [facts for name, facts in schedulers().items() if name not in SCHEDULERS]
    names += [facts.name for facts in others if facts.client and which(facts.client) is not None]
    removed = [name for name in names if name in REMOVED_ENGINES]
    names = [name for name in names if name not in removed]
    parts = [_HEAD, *(section(name, list_queues(name)) for name in names)]
    parts += [f"\n# {'; '.join(REMOVED_ENGINES[name])}\n" for name in removed]
    if (cluster := elsewhere().first_section(which)) is not None:
        names.append(cluster[0])
        parts.append(cluster[1])
    if not names and not removed:
        parts.append(f"\n# Neither {' nor '.join(CLIENTS)} is on PATH: no cluster was found.\n")
    parts += [_SSH_EXAMPLE, _DEFAULTS.format(name=names[0] if names else "hosts")]
    return "".join(parts)


def section(kind: str, found: QueueList) -> str:
    """Return the section of a scheduler."""
    facts = schedulers()[kind]
    word = facts.queue_word
    lines = ["", f"[engines.{kind}]", f"kind = {json.dumps(kind)}"]
    if found.problem is not None:
        lines.append(f"# {word}s could not be listed: {_comment(found.problem)}")
    lines += _queue_lines(word, found.queues)
    return "\n".join(lines) + "\n" + _REST.format(directive=facts.example)


def _queue_lines(word: str, queues: tuple[Queue, ...]) -> list[str]:
    """Return a line that selects the default or only queue, and a comment with all of them."""
    usable = [queue for queue in queues if queue.is_open and queue.starts] or list(queues)
    chosen = next((queue for queue in usable if queue.is_default), None)
    if chosen is None and len(usable) == 1:
        chosen = usable[0]
    lines = (
        [f"{word} = {json.dumps(chosen.name)}"] if chosen is not None else [f'# {word} = "NAME"']
    )
    for queue in queues[:_MAX_LISTED]:
        closed = ", takes no jobs now" if not queue.is_open else ""
        closed = closed or ("" if queue.starts else ", starts no jobs now")
        lines.append(f"#   {_comment(queue.name)}: {_comment(queue.about)}{closed}")
    if len(queues) > _MAX_LISTED:
        lines.append(f"#   and {len(queues) - _MAX_LISTED} more")
    return lines


def _comment(text: str) -> str:
    """Replace characters that can't be in a TOML comment, such as newlines."""
    return "".join(c if c.isprintable() else " " for c in text)


def _refusal(path: str) -> UsageError:
    fix = "edit it; muster engines shows what it says"
    return UsageError("there is a muster.toml already: it was not changed", where=path, fix=fix)
