"""What is fixed of a scheduler, as values: for code that has to tell schedulers apart and speaks none of their languages."""

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
        directive: How a line of options begins in its scripts; None where that is not checked.
        example: Such an option.
        queue_word: What it calls its queues.
        keys: Those of `SITE_KEYS` that mean something to it.
        instead: For others of them, what stands for it here.
    """

    name: str
    module: str
    install: str
    source: str = "torchmuster"
    client: str | None = None
    tools: tuple[str, ...] = ()
    job_variables: tuple[str, ...] = ()
    directive: str | None = None
    example: str = ""
    queue_word: str = "queue"
    keys: frozenset[str] = SITE_KEYS
    instead: Mapping[str, str] = field(default_factory=dict)
