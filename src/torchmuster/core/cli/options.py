"""Options that several commands have, each declared once: the same name, meaning and words everywhere."""

import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from torchmuster.core.spec.site_files import project_file, user_file
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.base import ObjectDialect
    from torchmuster.launcher.engines.own_job import OwnJob
    from torchmuster.launcher.spec.site import Site, Sites


# The user's sites for commands: `muster.toml` from the working directory on, with what other packages bring.


def my_sites() -> "Sites":
    """Return what `--on` can name here; files that are left alone are said on standard error.

    Raises:
        ManyErrors: Everything that is wrong with the files.
    """
    from torchmuster.core.cli.messages import print_notes
    from torchmuster.core.spec.site_files import is_new
    from torchmuster.launcher.engines.registry import schedulers
    from torchmuster.launcher.spec.site import load_sites

    sites = load_sites(os.getcwd(), os.environ, schedulers())
    print_notes([note for note in sites.notes if is_new(note)])
    return sites


# What a shell completes: run ids, `last`, and what `--on` names. Quick: names of folders, and keys of muster.toml.


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return `last` and the short ids that begin so; whole ids where that is what was typed."""
    from torchmuster.core.files.layout import runs_dir, short_id

    try:
        names = sorted(os.listdir(runs_dir()), reverse=True)
    except OSError:
        names = []
    whole = [name for name in names if incomplete and name.startswith(incomplete)]
    short = [short_id(name) for name in names if short_id(name).startswith(incomplete)]
    last = ["last"] if "last".startswith(incomplete) else []
    return list(dict.fromkeys([*last, *short, *whole]))


def complete_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Leave it to the shell, which knows files best."""
    return [CompletionItem(incomplete, type="file")]


def complete_engines(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the kinds of engines and the names of the user's own that begin so."""
    from torchmuster.core.spec.site_files import project_file, user_file
    from torchmuster.launcher.engines.registry import engine_entries

    names = ["local", "ssh", *engine_entries()]
    for path in (user_file(os.environ), project_file(os.getcwd())):
        names += _engines_of(path) if path is not None else []
    return sorted({name for name in names if name.startswith(incomplete)})


def _engines_of(path: str) -> list[str]:
    import tomllib

    try:
        with open(path, "rb") as file:
            engines: Any = tomllib.load(file).get("engines")
    except (OSError, ValueError):
        return []
    return list(engines) if isinstance(engines, dict) else []


def complete_sessions(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of sessions that begin so; whether they live costs more than a key."""
    from torchmuster.multirun.views.sessions import name_of_session, session_dirs

    names = dict.fromkeys(name_of_session(one) for one in session_dirs())
    return [name for name in names if name.startswith(incomplete)]


detach = click.option(
    "--detach", is_flag=True, help="Return at once; the run continues in the background."
)
here = click.option("--here", is_flag=True, help="Run on this machine, even inside a job.")
metadata = click.option("--metadata", multiple=True, help="key=value, or a YAML or JSON file.")
on = click.option(
    "--on",
    "engine",
    metavar="NAME",
    help="Engine or site; default this machine.",
    shell_complete=complete_engines,
)
parallel = click.option(
    "--parallel", type=click.IntRange(1, 256), default=8, help="Files at a time."
)
regex = click.option("--regex", help="Only files whose relative path matches (re.match).")
yes = click.option("-y", "--yes", is_flag=True, help="Without asking.")

# With what a job runs, and what it asks for.
python = click.option(
    "--python", metavar="PATH", help="The job's interpreter, with flags if quoted."
)
hosts = click.option("--hosts", metavar="A,B:N", help="Hosts for --on ssh, with their workers.")
hostfile = click.option("--hostfile", metavar="FILE", help="A file of hosts for --on ssh.")
queue = click.option("--queue", "--partition", "queue", metavar="NAME", help="Queue or partition.")
account = click.option("--account", metavar="NAME", help="Account or project to charge.")
cpus_per_node = click.option(
    "--cpus-per-node", type=click.IntRange(min=1), metavar="N", help="CPUs of each node."
)
gpus_per_node = click.option(
    "--gpus-per-node", type=click.IntRange(min=0), metavar="N", help="GPUs of each node."
)


def json(words: str = "As JSON.") -> Callable[[Any], Any]:
    """Return `--json`; `words` say more where it is not what the command prints otherwise."""
    return click.option("--json", "as_json", is_flag=True, help=words)


# `muster run --on ENGINE`: a run as a job of a scheduler, and a run inside a job that is there already.


def choose_engine(named: str | None, *, here: bool) -> str:
    """Return where a run goes: `--on`, else $MUSTER_ON, else the configuration, else this machine.

    Raises:
        UsageError: This is a login node, and nobody said that it is meant.
    """
    if named is not None:
        return named
    if here:
        return "local"
    if os.environ.get("MUSTER_ON"):
        return os.environ["MUSTER_ON"]
    # Looking for the files is cheap; reading them would slow every start down.
    is_configured = user_file(os.environ) or project_file(os.getcwd())
    sites = my_sites() if is_configured else None
    if sites is not None and sites.default_on is not None:
        click.echo(f"muster: --on {sites.default_on}, as [defaults] says", err=True)
        return sites.default_on
    from torchmuster.core.engines.schedulers import guard

    names = [site.name for site in sites.configured if site.is_batch] if sites is not None else []
    refusal = guard(os.environ, shutil.which, names)
    if refusal is not None:
        raise refusal
    return "local"


def find_site(name: str) -> "Site":
    """Return the site that `--on` names, one that takes jobs.

    Raises:
        UsageError: There is none, or it takes no jobs.
    """
    site = my_sites().get(name)
    if not site.is_batch:
        what = f"`{name}` takes no jobs: it is of kind {site.kind}"
        fix = "muster run --here" if site.kind == "local" else "muster run or submit --on " + name
        from torchmuster.launcher.engines.registry import engine_entries

        kinds = ", ".join(engine_entries())
        raise UsageError(what, where=site.origin, fix=f"{fix}; kinds that do: {kinds}")
    return site


def nodes_of_site(site: "Site", *, spares: int = 0) -> str | None:
    """Return what the site says of nodes, as `--nodes` has it: all hosts of ssh but the spare ones, None when it says nothing."""
    if site.nodes is None:
        from torchmuster.launcher.spec.site import site_hosts

        return str(max(len(site_hosts(site)) - spares, 1)) if site.kind == "ssh" else None
    least, most = site.nodes
    return str(most) if least == most else f"{least}:{most}"


def find_objects(name: str) -> "tuple[Site, ObjectDialect] | None":
    """Return the site of this name and its dialect, where jobs are objects of a cluster's API; None elsewhere."""
    from torchmuster.launcher.engines.base import object_dialect
    from torchmuster.launcher.engines.registry import load_dialect

    site = my_sites().sites.get(name)
    if site is None or not site.is_batch:
        return None
    dialect = object_dialect(load_dialect(site.kind))
    return (site, dialect) if dialect is not None else None


def check_engine(name: str, problems: "Problems") -> "Site | None":
    """Return the site of an engine that takes jobs; note one that does not exist or takes none."""
    try:
        return find_site(name)
    except UsageError as error:
        problems.found.append(error)
        return None


def find_allocation() -> "OwnJob | None":
    """Return the job that we are in; None outside of one."""
    from torchmuster.core.engines.schedulers import may_be_in_job

    if not may_be_in_job(os.environ):
        return None  # the usual case costs no import
    from torchmuster.launcher.engines.own_job import find_own_job

    return find_own_job()
