"""Fixed facts about schedulers, to distinguish them without knowing their commands.

Those of torchmuster are rows of `launcher/engines/facts.py`; the dialect of another package has attributes of the same names.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchmuster.errors import UsageError

# Keys of a site that only some schedulers use.
SITE_KEYS = frozenset({"qos", "constraint", "project", "start_with"})
# Removed engines: the refusal, and the replacement. An entry is kept for one release.
REMOVED_ENGINES = {
    "torque": (
        "muster submits no jobs to Torque, and starts nothing on the hosts of its jobs",
        'in its job, `muster run --hosts "$(sort -u $PBS_NODEFILE | paste -sd,)"`, or torchrun on every host',
    ),
}


class KeyKind(enum.Enum):
    """The type of a site key that only one scheduler has."""

    WORD = "word"  # no spaces and quotes
    LINE = "line"
    LINES = "lines"  # a list of them
    PAIRS = "pairs"  # a table: names and texts
    COUNT = "count"
    YES = "yes"  # true or false


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFacts:
    """One scheduler for which muster can write jobs.

    Attributes:
        module: The module with its dialect.
        install: What this machine needs to submit jobs.
        source: The package that provides it, for messages.
        client: The command whose presence indicates it; None if that is not checked.
        tools: All commands that a run needs here.
        job_variables: Variables with the job's id; the first that is set counts.
        variables: Prefixes of the variables that it sets in a job, valid on one node only.
        variables_of_users: Those among them that users set, too.
        directive: Prefix of an option line in its scripts; None if that is not checked.
        example: An example of such an option.
        queue_word: Its term for a queue.
        keys: The keys in `SITE_KEYS` that it uses.
        own_keys: Site keys that only it uses, with their types; plain names are words.
            `JobRequest.own_keys` has their values.
        sees_files: Its nodes see the client's files, as on a cluster's shared file system;
            otherwise a job brings what it needs.
        instead: For keys of other schedulers, the equivalent here.
    """

    name: str
    module: str
    install: str
    source: str = "torchmuster"
    client: str | None = None
    tools: tuple[str, ...] = ()
    job_variables: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    variables_of_users: tuple[str, ...] = ()
    directive: str | None = None
    example: str = ""
    queue_word: str = "queue"
    keys: frozenset[str] = SITE_KEYS
    own_keys: Mapping[str, KeyKind] | tuple[str, ...] = ()
    sees_files: bool = True
    instead: Mapping[str, str] = field(default_factory=dict)

    @property
    def own_kinds(self) -> dict[str, KeyKind]:
        """Return the type of each of its own keys."""
        if isinstance(self.own_keys, Mapping):
            return dict(self.own_keys)
        return dict.fromkeys(self.own_keys, KeyKind.WORD)


def refuse_removed_engine(kind: str, where: str) -> None:
    """Refuse an engine that was removed.

    Raises:
        UsageError: It was removed; the error names the replacement.
    """
    if kind in REMOVED_ENGINES:
        what, instead = REMOVED_ENGINES[kind]
        raise UsageError(what, where=where, fix=instead)
