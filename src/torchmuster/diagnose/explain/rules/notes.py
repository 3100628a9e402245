"""Notes on what slows a job but does not end it, and what it costs; shown with the verdict."""

import re

from torchmuster.diagnose.explain.case import Case

_MAX_NOTES = 3
# What a line shows, and what follows from it. Sources: torch's run.py and dataloader.py, NCCL's
# net.cc and graph/, Lightning's data connector.
_SLOW = (
    (
        re.compile(r"Setting OMP_NUM_THREADS environment variable for each process to be 1"),
        "slow: torchrun gave each process one CPU thread: set OMP_NUM_THREADS to cores / processes of the node",
    ),
    (
        re.compile(
            r"(?:NCCL INFO )?NET/IB : No device found|NCCL INFO Using network Socket|Failed to initialize NET plugin IB"
        ),
        "slow: NCCL goes over TCP sockets, not RDMA: between nodes often 5 to 20 times slower where InfiniBand or EFA is there",
    ),
    (
        re.compile(
            r"This DataLoader will create \d+ worker processes in total. Our suggested max number of worker in current system is (\d+)"
        ),
        "slow: there are more loader workers than cores that the process may use: ask for more (--cpus-per-task) or use fewer workers",
    ),
    (
        re.compile(r"does not have many workers which may be a bottleneck"),
        "slow: the data loader may be what the GPUs wait for: more num_workers",
    ),
    (
        re.compile(
            r"NCCL INFO P2P is disabled|P2P (?:is )?disabled (?:between|by)|NCCL_P2P_DISABLE set by environment to 1"
        ),
        "slow: GPUs of a node don't talk to each other directly (P2P is off): NCCL copies through the host's memory",
    ),
    (
        re.compile(r"GPU Direct RDMA Disabled|GDR 0\b.*NET/IB|nv_peer_mem .*not loaded"),
        "slow: RDMA goes through the host's memory (no GPUDirect): nvidia-peermem is not loaded or not used",
    ),
    (
        re.compile(
            r"find_unused_parameters=True was specified in DDP constructor, but did not find any unused"
        ),
        "slow: find_unused_parameters=True costs a walk through the graph in each step, and nothing was unused",
    ),
)


def slow_notes(case: Case) -> tuple[str, ...]:
    """Return what could make the job faster, as its logs show."""
    lines = [line.text for log in case.record.logs for line in (*log.header, *log.last)]
    lines += [event.line.text for event in case.events]
    found = [note for regex, note in _SLOW if any(map(regex.search, lines))]
    return tuple(found[:_MAX_NOTES])
