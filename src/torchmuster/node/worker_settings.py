"""What follows for the workers of an attempt from what their agent was told at its start, and by its head."""

import os
import sys
from collections.abc import Callable, Mapping

from torchmuster.diagnose.facts.gpus import visible_gpus
from torchmuster.model import contract
from torchmuster.model.display.terminal import Terminal
from torchmuster.net.address import interface_of
from torchmuster.net.messages import StartAttempt, Welcome
from torchmuster.node.options import AgentOptions
from torchmuster.node.workers import WorkerSettings


def worker_settings(
    options: AgentOptions,
    welcome: Welcome,
    order: StartAttempt,
    *,
    environment: Mapping[str, str],
    variables: Mapping[str, str],
    socket_path: str,
    own_address: str | None,
    has_store: bool,
    terminal: Terminal | None,
) -> WorkerSettings:
    """Return what is the same for all workers of an attempt on this node.

    Args:
        options: The agent's.
        welcome: What the head has said of the run.
        order: What it has said of the attempt.
        environment: Of the job's interpreter.
        variables: What the node's set-up has made, such as its scratch folder.
        socket_path: Where workers call the agent.
        own_address: Where the head is reached from; None without a connection.
        has_store: A store is offered.
        terminal: What shows the output is a terminal, of this size now.
    """
    run_dir = options.run_directory(welcome.run_id)
    extra = {contract.SOCKET_VARIABLE: socket_path, contract.RUN_DIR_VARIABLE: run_dir.path}
    extra |= variables
    # Reverse DNS stalls every worker's start by 5 s when one answer is lost.
    if "RES_OPTIONS" not in environment:
        extra["RES_OPTIONS"] = "timeout:1 attempts:1"
    if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environment:
        extra["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    address = order.master_addr if options.is_head else options.local_addr or own_address
    extra |= _network_variables(order.interface, address, environment)
    return WorkerSettings(
        run_id=options.plan.rdzv_id or welcome.run_id,
        run_dir=run_dir,
        role=options.plan.role,
        extra_env=extra,
        base_env=environment,
        shown=_shown(options, welcome.tee),
        saved=options.saved,
        gpus=tuple(visible_gpus()),
        virtual_local_rank=options.plan.virtual_local_rank,
        has_store=has_store,
        # `--debug` was given, and the user has not named a file himself.
        nccl_files=contract.DEBUG_VARIABLE in environment and "NCCL_DEBUG_FILE" not in environment,
        terminal=terminal,
        every_line=options.plan.every_line,
        gives_input=options.local_show and _has_input() and order.stdin_rank is None,
        prefixes=(welcome.tee == "all" and order.world_size > 1)
        or (options.local_show and options.num_workers > 1),
    )


def _network_variables(
    chosen: str | None, address: str | None, environment: Mapping[str, str]
) -> dict[str, str]:
    if chosen is not None:
        from torchmuster.node.network_settings import network_variables

        return network_variables(chosen, environment)
    interface = interface_of(address) if address else None
    if interface is None or "GLOO_SOCKET_IFNAME" in environment:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface}


def _shown(options: AgentOptions, tee: str) -> Callable[[int, int], frozenset[int]]:
    """Return which streams of (rank, local rank) the terminal shows."""
    console = options.console
    if console is not None:
        return lambda rank, local_rank: console(local_rank)
    both, none = frozenset({1, 2}), frozenset[int]()
    return lambda rank, local_rank: both if tee == "all" or (tee == "0" and not rank) else none


def _has_input() -> bool:
    """Say whether somebody has given this process a file or a pipe to read; a terminal is read by `muster` itself."""
    return sys.stdin is not None and not os.isatty(0)
