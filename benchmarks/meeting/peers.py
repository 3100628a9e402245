"""torchrun's agents up to their ranks: torch's DynamicRendezvousHandler on the c10d backend.

Runs with the Python of the torch that is measured:

    peers.py NUM_NODES PORT LIMIT_S
"""

import multiprocessing
import os
import sys
import time
from multiprocessing.synchronize import Barrier
from typing import Any

Forking = multiprocessing.get_context("fork")


def agent(
    port: int, num_nodes: int, number: int, limit_s: float, barrier: Barrier, out: Any
) -> None:
    """Run torch's own rendezvous handler up to its ranks."""
    import torch.distributed.elastic.rendezvous.registry as registry
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"127.0.0.1:{port}",
        run_id="benchmark",
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        is_host=number == 0,
        last_call_timeout=1,
        join_timeout=int(limit_s),
    )
    barrier.wait()
    handler = registry.get_rendezvous_handler(parameters)
    handler.next_rendezvous()
    out.send(time.monotonic())
    out.recv()
    os._exit(0)


def main() -> None:
    """Import torch once, fork the agents, let them go, and print the seconds."""
    import torch.distributed.elastic.rendezvous.registry  # noqa: F401 - for the forks

    num_nodes, port, limit_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    barrier = Forking.Barrier(num_nodes + 1)
    pipes: list[Any] = []
    processes: list[Any] = []
    for number in range(num_nodes):
        here, there = Forking.Pipe()
        arguments = (port, num_nodes, number, limit_s, barrier, there)
        process = Forking.Process(target=agent, args=arguments, daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    barrier.wait()
    released = time.monotonic()
    reached: list[float] = []
    for pipe in pipes:
        if not pipe.poll(max(0.0, released + limit_s - time.monotonic())):
            sys.exit(f"{len(reached)} of {num_nodes} agents had their ranks after {limit_s:g} s")
        reached.append(pipe.recv())
    for process in processes:
        process.kill()
    print(max(reached) - released)


if __name__ == "__main__":
    main()
