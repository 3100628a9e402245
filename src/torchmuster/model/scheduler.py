"""Fixed facts about a scheduler, as values: for code that has to distinguish schedulers without knowing their commands.

Those of torchmuster are rows of `engines/schedulers.py`; the dialect of another package has attributes of the same names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# The keys of a site that mean something to some schedulers only.
SITE_KEYS = frozenset({"qos", "constraint", "project", "start_with"})


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
        own_keys: Keys of a site that mean something to it alone, with a text: `JobRequest.own_keys`.
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
    own_keys: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
