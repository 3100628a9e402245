"""Everything that makes an agent, from the command line that a client or an engine has written, or from `muster torchrun`."""

import argparse
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.display.terminal import Terminal
from torchmuster.model.plan import RunPlan
from torchmuster.net.secret import read_secret
from torchmuster.node.environment import share_threads, take_environment

if TYPE_CHECKING:
    from torchmuster.net.messages import Event


class Spread(Protocol):
    """Who starts agents on other hosts for the head of `muster torchrun`: `owner/jobs/spread.py`."""

    def begin(self, event: Callable[..., object]) -> None:
        """Begin; `event` notes what is done."""

    def need(self, places: Sequence[int]) -> None:
        """Take places that lack an agent."""

    def hear(self, event: "Event") -> None:
        """Take every event of the run."""

    def is_ours(self, host: str) -> bool:
        """Say whether an agent for this host was started here."""

    async def close(self) -> None:
        """End what is left of what was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLaunch:
    """Everything that makes an agent: given on a command line, or by `muster torchrun`.

    Attributes:
        run_dir: The run directory that the run's owner has made; None under `muster torchrun`.
        listening: The head's socket; None on other nodes.
        relays_store: The line names the head's port, and a script may call torch's store there.
        open_secret: The public key, for nodes that have no common key; None forbids it.
        local_addr: This node's own address, when the user knows better.
        terminal: What shows output is a terminal; None where it is not.
        console: For a local rank, the streams shown here; None follows the run's --tee.
        saved: For (attempt, local rank, stream), a second file that gets it; stream 0 is the failure in JSON.
        lifeline_fd: Its end of file means that the owner of the run has gone.
        jobs: The schedulers' jobs that it is in; empty where the line names the run.
        error_file: Where the failure is told in torchrun's JSON.
        spread: Starts the agents of other hosts, where no engine does.
        hint: What the head says while nodes are missing.
    """

    plan: RunPlan
    num_workers: int
    host: str
    addresses: tuple[tuple[str, int], ...]
    secret: bytes
    environment: Mapping[str, str]
    run_dir: str | None = None
    place: int | None = None
    listening: socket.socket | None = None
    relays_store: bool = False
    own_address: str = "127.0.0.1"
    lifeline_fd: int | None = None
    first_attempt: int = 0
    restarts_spent: int = 0
    open_secret: bytes | None = None
    local_addr: str | None = None
    local_show: bool = False
    terminal: Terminal | None = None
    console: Callable[[int], frozenset[int]] | None = None
    saved: Callable[[int, int, int], str | None] | None = None
    agent_log: str | None = None
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    notes: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    error_file: str | None = None
    spread: "Spread | None" = None
    hint: str = ""

    @property
    def sets_node_up(self) -> bool:
        """Say whether the node is set up before its workers start; `muster torchrun` has nothing of the kind."""
        return self.run_dir is not None

    def run_directory(self, run_id: str) -> RunDir:
        """Return where this agent writes."""
        from torchmuster.files.layout import runs_dir

        return RunDir(self.run_dir or os.path.join(runs_dir(), run_id))


def read_launch(arguments: list[str]) -> AgentLaunch:
    """Return what the command line of an agent says, with the plan and the key of its run directory."""
    parser = argparse.ArgumentParser(prog="agent")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--place", type=int, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--listen-fd", type=int)
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--first-attempt", type=int, default=0)
    parser.add_argument("--restarts-spent", type=int, default=0)
    parser.add_argument("--environment")
    parser.add_argument("--terminal", type=Terminal.from_word)
    options = parser.parse_args(arguments)
    if options.environment is not None:
        take_environment(options.environment)
    run_dir = RunDir(options.run_dir)
    with open(run_dir.plan) as file:
        plan = codec.from_plain(RunPlan, json.load(file))
    addresses = tuple(_read_address(word) for word in options.head.split(","))
    listening = None
    if options.listen_fd is not None:
        listening = socket.socket(fileno=options.listen_fd)
        listening.setblocking(False)
    num_workers = plan.num_workers(options.place)
    name = plan.node_name(options.place)
    return AgentLaunch(
        plan=plan,
        num_workers=num_workers,
        host=name,
        addresses=addresses,
        secret=read_secret(run_dir.secret),
        environment=job_environment(num_workers),
        run_dir=run_dir.path,
        place=options.place,
        listening=listening,
        own_address=addresses[0][0],
        lifeline_fd=options.lifeline_fd,
        first_attempt=options.first_attempt,
        restarts_spent=options.restarts_spent,
        terminal=options.terminal,
        agent_log=run_dir.agent_log(name),
    )


def _read_address(word: str) -> tuple[str, int]:
    host, _, port = word.rpartition(":")
    return host, int(port)


def job_environment(num_workers: int) -> dict[str, str]:
    """Return the environment for the job's interpreter: ours, and what torchrun adds to it."""
    environment = dict(os.environ)
    share_threads(environment, num_workers)
    return environment
