"""Known schedulers, including those of other packages, and the one whose job contains this process.

Other packages add theirs by an entry point: `[project.entry-points."torchmuster.engines"]`,
`lsf = "package.lsf"`, a module with a `DIALECT`.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from torchmuster.core.model.text import nearest
from torchmuster.errors import UsageError
from torchmuster.launcher.engines.base import Dialect
from torchmuster.launcher.engines.schedulers import SCHEDULERS, facts_of, known_jobs, may_be_in_job
from torchmuster.launcher.model.job import Allocation
from torchmuster.launcher.model.scheduler import SchedulerFacts, refuse_removed_engine

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "torchmuster.engines"
_RESERVED = "local"
# Removed engines, and the engine that can ask about the jobs of their runs.
_SUCCESSORS = {"torque": "pbs"}


def engine_entries(found: "Iterable[EntryPoint] | None" = None) -> dict[str, SchedulerFacts]:
    """Return all schedulers by name; `found` replaces the installed entry points.

    Raises:
        UsageError: Two packages provide the same name.
    """
    entries = dict(SCHEDULERS)
    for point in _installed() if found is None else found:
        source = point.dist.name if point.dist is not None else point.value
        known = entries.get(point.name)
        if known is not None or point.name == _RESERVED:
            other = known.source if known is not None else "torchmuster"
            raise UsageError(
                f"two packages bring an engine `{point.name}`: {other} and {source}",
                where=f"entry point {GROUP}: {point.name} = {point.value}",
                fix=f"pip uninstall {source if other == 'torchmuster' else other}",
            )
        entries[point.name] = SchedulerFacts(
            name=point.name, module=point.value, install=f"what {source} needs", source=source
        )
    return entries


@functools.cache  # listing runs asks for each run, and this reads a file of every installed package
def _installed() -> "tuple[EntryPoint, ...]":
    from importlib.metadata import entry_points

    return tuple(entry_points(group=GROUP))


class Schedulers(Mapping[str, SchedulerFacts]):
    """The schedulers by name; other packages' dialects are loaded only when needed."""

    def __init__(self, entries: dict[str, SchedulerFacts]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> SchedulerFacts:
        entry = self._entries[name]
        if name in SCHEDULERS:
            return entry
        try:
            return facts_of(load_dialect(name, self._entries), entry)
        except UsageError:
            return entry  # the error comes up when a job is written

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def schedulers() -> Schedulers:
    """Return the facts of all schedulers by name."""
    return Schedulers(engine_entries())


def load_dialect(name: str, entries: dict[str, SchedulerFacts] | None = None) -> Dialect:
    """Return the dialect of this name.

    Raises:
        UsageError: There is none, or its module can't be imported.
    """
    known = engine_entries() if entries is None else entries
    entry = known.get(name)
    if entry is None:
        refuse_removed_engine(name, f"--on {name}")
        near = nearest(name, [_RESERVED, *known])
        names = ", ".join([_RESERVED, *known])
        fix = f"did you mean `{near}`?" if near else f"engines: {names}"
        raise UsageError(f"there is no engine `{name}`", where="--on", fix=fix)
    try:
        dialect: Dialect = importlib.import_module(entry.module).DIALECT
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the engine `{name}` can't be loaded",
            where=entry.module,
            why=str(error),
            fix=f"it comes from {entry.source}: install it again",
        ) from error
    return dialect


def dialect_of_record(name: str) -> Dialect:
    """Return the dialect for the jobs of a recorded run; for a removed engine, its successor's.

    Raises:
        UsageError: There is none.
    """
    return load_dialect(_SUCCESSORS.get(name, name))


def find_job(
    environment: Mapping[str, str], read: Callable[[str], str]
) -> tuple[Dialect, Allocation] | None:
    """Return the job that contains this process, with its scheduler's dialect; None if none does.

    `read` reads a small file. Engines of other packages are asked only if no built-in one knows the
    job.

    Raises:
        MusterError: There is a job, but its nodes can't be read.
    """
    if not may_be_in_job(environment):
        return None  # the usual case searches no packages
    known = [name for name, _ in known_jobs(environment)]
    for dialect in [load_dialect(name) for name in known] or _others():
        allocation = dialect.allocation(environment, read)
        if allocation is not None and allocation.nodes:
            return dialect, allocation
    return None


def find_job_id(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the scheduler and id of the job that contains this process; None if none does."""
    if known := known_jobs(environment):
        return known[0]
    found = find_job(environment, lambda path: "")
    return (found[0].name, found[1].job_id) if found is not None else None


def _others() -> Iterator[Dialect]:
    """Yield the loadable dialects of other packages; naming a broken one shows its error."""
    entries = engine_entries()
    for name in entries.keys() - SCHEDULERS.keys():
        with contextlib.suppress(UsageError):
            yield load_dialect(name, entries)
