"""The training that the matrix hurts from outside: it knows of no fault.

    train.py FOLDER SCRATCH [--port PORT]

Each rank reads how many samples its next batch has from FOLDER/batch-RANK, adds them up with the others, and the first rank
of each node saves to the node's own disk, SCRATCH, where a package that it imports lies too. With `--port` the ranks
meet at a fixed port, as many scripts do.
"""

import os
import sys
import time

folder, scratch = sys.argv[1:3]
open(os.path.join(folder, f"began-{os.environ['RANK']}"), "w").close()
sys.path.insert(0, os.path.join(scratch, "packages"))
import matrix_tokens  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def meet():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if sys.argv[3:4] == ["--port"]:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(sys.argv[4]), world, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
    return rank


def read_batch(rank):
    with open(os.path.join(folder, f"batch-{rank}")) as file:
        return torch.ones(int(file.read()))


def save(total):
    path = os.path.join(scratch, f"snapshot-{os.environ['GROUP_RANK']}")
    with open(f"{path}.new", "wb") as file:
        file.write(total.numpy().tobytes() * (1 << 18))
    os.replace(f"{path}.new", path)


def main():
    rank = meet()
    while True:
        total = matrix_tokens.count(read_batch(rank))
        dist.all_reduce(total)
        if os.environ["LOCAL_RANK"] == "0":
            save(total)
        with open(os.path.join(folder, f"up-{rank}.new"), "w") as file:
            file.write(str(os.getpid()))
        os.replace(file.name, os.path.join(folder, f"up-{rank}"))
        time.sleep(0.05)


main()
