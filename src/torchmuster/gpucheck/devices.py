"""Which rank gets which device, and what happens where there are more ranks than devices."""

from torchmuster.diagnose.facts.gpus import visible_gpus
from torchmuster.gpucheck.kit import FailedError, ImpossibleError, Kit


def by_rank(kit: Kit) -> None:
    """Each rank has a device of its own, by its local rank."""
    num = len(kit.machine.gpus)
    ran = kit.muster(["--nproc-per-node", "gpu"], "use", "where")
    ranks = ran.ranks("device")
    ran.expect(sorted(ranks) == list(range(num)), f"{num} GPUs, but ranks {sorted(ranks)}")
    ran.expect(len(set(ranks.values())) == num, f"two ranks have one device: {ranks}")


def by_uuid(kit: Kit) -> None:
    """`CUDA_VISIBLE_DEVICES` by UUID is counted and passed on."""
    gpu = kit.machine.gpus[-1]
    for chosen in (str(gpu.index), gpu.uuid):
        env = {"CUDA_VISIBLE_DEVICES": chosen}
        ran = kit.muster(["--nproc-per-node", "gpu"], "use", "where", env=env)
        ran.expect(list(ran.ranks("device")) == [0], "not one worker for one visible GPU")
        ran.expect(ran.one("visible") == [chosen], f"the worker sees {ran.one('visible')}")
        seen = str(ran.one("device")).removeprefix("GPU-")
        named = {gpu.uuid.removeprefix("GPU-"), chosen.removeprefix("GPU-")}
        ran.expect(seen in named, f"asked for {chosen}, the worker has {seen}")


def schedulers_lists(kit: Kit) -> None:
    """The lists of devices that Slurm, PBS and Kubernetes give are counted as CUDA counts them."""
    uuid = kit.machine.gpus[0].uuid
    lists = {
        "Slurm, numbers": ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "2,3"}, ["0", "1"]),
        "Slurm, a step without a GPU": ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        "PBS, UUIDs": ({"CUDA_VISIBLE_DEVICES": f"{uuid},{uuid}"}, [uuid, uuid]),
        "PBS, parts of a GPU": ({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, ["MIG-1", "MIG-2"]),
        "Kubernetes, a pod's own": ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": uuid}, ["0"]),
        "hidden": ({"CUDA_VISIBLE_DEVICES": ""}, []),
    }  # fmt: skip
    for name, (variables, wanted) in lists.items():
        found = visible_gpus(variables)
        if found != wanted:
            raise FailedError(f"{name}: {variables} is read as {found}, not {wanted}")


def too_many_ranks(kit: Kit) -> None:
    """More ranks than devices are refused by the library, and the launcher says it of every script."""
    num = len(kit.machine.gpus) + 1
    ran = kit.muster(["--nproc-per-node", num, "--max-restarts", 0], "shared", ok=False)
    words = "has no GPU" if num > 2 else "share one GPU"
    ran.expect_words(words, "share_gpus")
    ran.expect_words(f"{num} workers on a node with {num - 1} GPU")


def shared_device(kit: Kit) -> None:
    """By `share_gpus=True` ranks share a device, and Gloo sums."""
    num = len(kit.machine.gpus) + 1
    ran = kit.muster(["--nproc-per-node", num], "shared", "share")
    ran.expect(ran.one("total") == num, f"the sum over {num} ranks is {ran.one('total')}")
    ran.expect(ran.one("backend") == "gloo", f"the backend is {ran.one('backend')}")


def parts_of_gpus(kit: Kit) -> None:
    """A worker on each part of a GPU (MIG)."""
    if not any(word.startswith("MIG-") for word in visible_gpus()):
        raise ImpossibleError("no part of a GPU (MIG) is visible here")
    by_rank(kit)
