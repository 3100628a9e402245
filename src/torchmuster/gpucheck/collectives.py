"""NCCL and Gloo on the device."""

from torchmuster.engines.own_job import find_own_job
from torchmuster.gpucheck.kit import ImpossibleError, Kit


def nccl_refuses(kit: Kit) -> None:
    """Two ranks on one GPU: NCCL refuses, and muster says why."""
    ran = kit.muster(
        ["--nproc-per-node", 2, "--max-restarts", 0],
        "group",
        "backend=nccl",
        env={"CUDA_VISIBLE_DEVICES": kit.machine.names[0]},
        ok=False,
    )
    ran.expect_words("use the same GPU", "as many ranks on a node as it has GPUs")


def gloo_shares(kit: Kit) -> None:
    """Two ranks on one GPU sum tensors of the device by Gloo."""
    env: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": kit.machine.names[0]}
    ran = kit.muster(["--nproc-per-node", 2], "group", "backend=gloo", env=env)
    ran.expect(ran.ranks("total") == {0: 8.0, 1: 8.0}, f"the sums are {ran.ranks('total')}")


def nccl_alone(kit: Kit) -> None:
    """NCCL with one rank sums; the time to that in its parts: fork, context, NCCL."""
    ran = kit.muster(["--nproc-per-node", 1], "group", "backend=nccl")
    ran.expect(ran.one("total") == 4.0, f"the sum is {ran.one('total')}")
    fact = next(fact for fact in ran.facts if "done" in fact)
    parts = [ran.began, fact["began"], fact["context"], fact["done"]]
    ran.expect(parts == sorted(parts), f"the moments are not in order: {parts}")
    kit.measures["start and fork, s"] = round(parts[1] - parts[0], 3)
    kit.measures["context, s"] = round(parts[2] - parts[1], 3)
    kit.measures["NCCL and the first all-reduce, s"] = round(parts[3] - parts[2], 3)


def nccl_over_gpus(kit: Kit) -> None:
    """NCCL sums over all GPUs of this machine."""
    num = len(kit.machine.gpus)
    ran = kit.muster(["--nproc-per-node", "gpu"], "group", "backend=nccl")
    ran.expect(set(ran.all("total")) == {4.0 * num}, f"the sums are {ran.ranks('total')}")


def nccl_over_nodes(kit: Kit) -> None:
    """NCCL sums over all nodes of the job that this runs in."""
    job = find_own_job()
    if job is None or len(job.nodes) < 2:
        raise ImpossibleError("needs several nodes: start it in a job that has them")
    ran = kit.muster(["--nproc-per-node", "gpu"], "group", "backend=nccl", over_nodes=True)
    ran.expect(len(ran.ranks("total")) >= 2, "fewer than two ranks reported")
