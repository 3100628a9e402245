"""Fixed facts about a scheduler, as values: for code that has to distinguish schedulers without knowing their commands.

Those of torchmuster are rows of `launcher/engines/schedulers.py`; the dialect of another package has attributes of the same names.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchmuster.errors import UsageError

# The keys of a site that mean something to some schedulers only.
SITE_KEYS = frozenset({"qos", "constraint", "project", "start_with"})
# Engines that were removed: what is refused, and what to use instead. An entry stays for one release.
REMOVED_ENGINES = {
    "torque": (
        "muster submits no jobs to Torque, and starts nothing on the hosts of its jobs",
        'in its job, `muster run --hosts "$(sort -u $PBS_NODEFILE | paste -sd,)"`, or torchrun on every host',
    ),
}


class KeyKind(enum.Enum):
    """What a key of a site holds that means something to one scheduler alone."""

    WORD = "word"  # no spaces and quotes
    LINE = "line"
    LINES = "lines"  # a list of them
    PAIRS = "pairs"  # a table: names and texts
    COUNT = "count"
    YES = "yes"  # true or false


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFacts:
    """One scheduler that jobs can be written for.

    Attributes:
        module: Where its dialect is.
        install: What has to be on this machine to submit.
        source: Who brings it, for messages.
        client: The command whose presence means that it is here; None where nobody looks for it.
        tools: All commands that a run needs here.
        job_variables: Those that its jobs have; the first that is set tells the job's id.
        variables: How the names of the variables begin that it sets in a job: true of one node only.
        variables_of_users: Those among them that users set, too.
        directive: How a line of options begins in its scripts; None where that is not checked.
        example: Such an option.
        queue_word: What it calls its queues.
        keys: Those of `SITE_KEYS` that mean something to it.
        own_keys: Keys of a site that mean something to it alone, and what they hold; where only names are given, a word.
            `JobRequest.own_keys` has their texts.
        sees_files: Its nodes see the files of the client, as a cluster's shared file system lets them; else a job brings
            along what it needs.
        instead: For others of them, what stands for it here.
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
        """Return what each of its own keys holds."""
        if isinstance(self.own_keys, Mapping):
            return dict(self.own_keys)
        return dict.fromkeys(self.own_keys, KeyKind.WORD)


def refuse_removed_engine(kind: str, where: str) -> None:
    """Refuse an engine that was removed.

    Raises:
        UsageError: It names what to use instead.
    """
    if kind in REMOVED_ENGINES:
        what, instead = REMOVED_ENGINES[kind]
        raise UsageError(what, where=where, fix=instead)
