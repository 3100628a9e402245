"""Which schedulers there are: name, module, and what has to be installed.

Others add theirs by an entry point: `[project.entry-points."torchmuster.engines"]`, `lsf = "package.lsf"`,
a module with a `DIALECT`.
"""

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from torchmuster.engines.base import Dialect
from torchmuster.errors import UsageError

GROUP = "torchmuster.engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """One scheduler that jobs can be written for.

    Attributes:
        install: What has to be on this machine to submit.
        source: Who brings it, for messages.
    """

    name: str
    module: str
    install: str
    source: str = "torchmuster"


_OURS = (
    EngineEntry(
        name="slurm",
        module="torchmuster.engines.slurm",
        install="Slurm's commands (Debian: slurm-client)",
    ),
    EngineEntry(
        name="pbs",
        module="torchmuster.engines.pbs",
        install="the commands of OpenPBS or PBS Professional (openpbs-client)",
    ),
    EngineEntry(
        name="torque",
        module="torchmuster.engines.torque",
        install="the commands of Torque (torque-client)",
    ),
)
_RESERVED = "local"


def engine_entries(found: Iterable[EntryPoint] | None = None) -> dict[str, EngineEntry]:
    """Return all dialects by name; `found` are the entry points, None for those that are installed.

    Raises:
        UsageError: Two bring the same name.
    """
    entries = {entry.name: entry for entry in _OURS}
    for point in entry_points(group=GROUP) if found is None else found:
        source = point.dist.name if point.dist is not None else point.value
        known = entries.get(point.name)
        if known is not None or point.name == _RESERVED:
            other = known.source if known is not None else "torchmuster"
            raise UsageError(
                f"two packages bring an engine `{point.name}`: {other} and {source}",
                where=f"entry point {GROUP}: {point.name} = {point.value}",
                fix=f"pip uninstall {source if other == 'torchmuster' else other}",
            )
        entries[point.name] = EngineEntry(
            name=point.name, module=point.value, install=f"what {source} needs", source=source
        )
    return entries


def load_dialect(name: str, entries: dict[str, EngineEntry] | None = None) -> Dialect:
    """Return the dialect of this name.

    Raises:
        UsageError: There is none, with a near miss; or its module can't be imported.
    """
    known = engine_entries() if entries is None else entries
    entry = known.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, [_RESERVED, *known], n=1)
        names = ", ".join([_RESERVED, *known])
        fix = f"did you mean `{near[0]}`?" if near else f"engines: {names}"
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
