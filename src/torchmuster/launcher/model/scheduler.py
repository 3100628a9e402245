"""Fixed facts about schedulers, to distinguish them without knowing their commands.

Those of torchmuster are rows of `launcher/engines/facts.py`; the dialect of another package has attributes of the same names.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

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


MAX_NODES = 65536
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_WORD = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # commas in brackets are a part of it


def _expand_word(word: str, room: int) -> list[str]:
    """Expand one name; several brackets give all combinations, the last varying fastest."""
    pieces = _BRACKETS.split(word)
    choices: list[list[str]] = []
    total = 1
    for position, piece in enumerate(pieces):
        choices.append(_expand_range(piece, room) if position % 2 else [piece])
        total *= len(choices[-1])
        if total > room:
            raise ValueError(f"`{word}` are more than {MAX_NODES} names")
    return ["".join(parts) for parts in product(*choices)]


def _expand_range(text: str, room: int) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"`[{text}]` is not a range of numbers")
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if last < first or last - first >= room:
            raise ValueError(f"`[{text}]` is not a range, or is one of more than {MAX_NODES}")
        width = len(match.group(1))  # leading zeros are part of the name
        numbers += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return numbers


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return the names in a host list, in its order.

    Raises:
        ValueError: It is invalid, or has more than 65536 names.

    Source: https://slurm.schedmd.com/scontrol.html, "show hostnames".
    """
    text = text.strip()
    words = _WORD.findall(text)
    if not words or ",".join(words) != text:
        raise ValueError(f"`{text}` is not a valid host list")
    names: list[str] = []
    for word in words:
        names += _expand_word(word, MAX_NODES - len(names))
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return one number per node from `8(x2),4`.

    Raises:
        ValueError: It is invalid or too long.

    Source: https://slurm.schedmd.com/sbatch.html, SLURM_JOB_CPUS_PER_NODE.
    """
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        repeat = int(match.group(2) or 1) if match else 0
        if match is None or repeat > MAX_NODES - len(counts):
            raise ValueError(f"`{text}` is not a valid list of counts")
        counts += [int(match.group(1))] * repeat
    return tuple(counts)
