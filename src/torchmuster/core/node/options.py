"""What an agent is told when it is started."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchmuster.core.files.layout import RunDir, runs_dir
from torchmuster.core.model.lines import Terminal
from torchmuster.core.model.plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrder:
    """The command line of an agent.

    Attributes:
        head: Where the head may listen, `host:port`.
        listen_fd: The head's socket, which the agent of place 0 inherits.
        lifeline_fd: Its end of file means that the owner of the run has gone.
        first_attempt: For the head; `restarts_spent` too.
        term: For the head of a run that may have another one: its newest; None: there is only one (`core/model/succession.py`).
        holder: Who has claimed that.
        environment: A file with the variables to take; None keeps those it was started with.
        terminal: What shows the run's output, as `Terminal.to_word` writes it.
    """

    run_dir: str
    place: int
    head: tuple[str, ...]
    lifeline_fd: int | None = None
    listen_fd: int | None = None
    first_attempt: int = 0
    restarts_spent: int = 0
    term: int | None = None
    holder: str = ""
    environment: str | None = None
    terminal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlace:
    """Where a head is, and how it knows its agents.

    Attributes:
        addresses: Where it may listen; the first that answers in a race is taken.
        open_secret: The public key, where no key in common is needed; None forbids it.
        join_timeout_s: How long the head may be out of reach.
        file: Where the addresses of the head are written that takes a lost one's place; None: there is none.
        heirs: The folder of claims, where an agent may take its place (`docs/succession.md`).
    """

    addresses: tuple[tuple[str, int], ...]
    secret: bytes
    open_secret: bytes | None = None
    join_timeout_s: float
    file: str | None = None
    heirs: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent is told when it is started.

    Attributes:
        head: Where the head is.
        environment: For the job's interpreter.
        run_dir: The run directory that the run's owner has made; None under `muster torchrun`.
        is_head: The head is in this process.
        local_addr: This node's own address, when the user knows better.
        local_show: Show this node's output here instead of sending it to the head.
        terminal: What shows it is a terminal: the ranks that are shown get one, too.
        console: For a local rank, the streams shown here; None follows the run's --tee.
        saved: For (attempt, local rank, stream), a second file that gets it; stream 0 is the failure in JSON.
        jobs: The schedulers' jobs that it is in; empty where the line names the run.
    """

    plan: RunPlan
    num_workers: int
    host: str
    head: HeadPlace
    environment: Mapping[str, str]
    run_dir: str | None = None
    place: int | None = None
    is_head: bool = False
    local_addr: str | None = None
    local_show: bool = False
    terminal: Terminal | None = None
    console: Callable[[int], frozenset[int]] | None = None
    saved: Callable[[int, int, int], str | None] | None = None
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    jobs: tuple[str, ...] = ()

    @property
    def stdin_fd(self) -> int | None:
        """What is typed here, where that is for a rank."""
        return 0 if self.local_show and self.plan.stdin_rank is not None else None

    @property
    def is_alone(self) -> bool:
        """Say whether it is all of its run, under `muster torchrun`: nobody would start other workers in place of its own."""
        return self.run_dir is None and self.is_head and self.plan.max_nodes == 1

    def run_directory(self, run_id: str) -> RunDir:
        """Return where this agent writes."""
        return RunDir(self.run_dir or os.path.join(runs_dir(), run_id))
