"""The device of a worker, real or pretended, and the facts that a script reports to the kit.

A pretended device is the processor: `GPUCHECK_PRETEND` names a folder in which each process that
uses a device has a file `<device>-<pid>`, like the driver's context. With `GPUCHECK_BREAK=WORD` a
fact with that name is reported wrongly, or a script does not do its work: the tests use it to see
each check fail.
"""

import json
import os
import sys
import time
from typing import Any, NoReturn

import torch

PRETENDED = os.environ.get("GPUCHECK_PRETEND", "")
FACTS = os.environ.get("GPUCHECK_FACTS", "")
_NUM_PRETENDED = int(os.environ.get("GPUCHECK_PRETEND_GPUS", "1"))
_ENDLESS_CYCLES = 1 << 50


def is_broken(word: str) -> bool:
    """Return whether a test wants this to fail."""
    return word in os.environ.get("GPUCHECK_BREAK", "").split(",")


def say(**facts: Any) -> None:
    """Report facts: append a line of JSON with rank, attempt and time to this process's file."""
    own = {
        "at": time.time(),
        "pid": os.getpid(),
        "rank": int(os.environ.get("RANK", "0")),
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }
    line = json.dumps({**own, **{name: _fact(name, value) for name, value in facts.items()}})
    with open(os.path.join(FACTS, f"{os.getpid()}.jsonl"), "a") as file:
        file.write(line + "\n")


def _fact(name: str, value: Any) -> Any:
    """Return a fact, changed if a test wants it to be wrong."""
    if not is_broken(name):
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 3 + 1e6
    return "broken" if isinstance(value, str) else [*value, "broken"]


def device() -> torch.device:
    """Return the device of this rank, by its local rank; ranks may share one."""
    if PRETENDED:
        return torch.device("cpu")
    return torch.device("cuda", _local_rank() % max(torch.cuda.device_count(), 1))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def visible() -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES of the devices that this process sees."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [word for word in chosen.split(",") if word]
    return [str(n) for n in range(_NUM_PRETENDED if PRETENDED else torch.cuda.device_count())]


def device_name() -> str:
    """Return a unique name of this rank's device: its UUID."""
    if PRETENDED:
        ids = visible()
        return ids[_local_rank() % len(ids)] if ids else "none"
    return str(torch.cuda.get_device_properties(device()).uuid)


def touch() -> torch.device:
    """Make this process use its device: create the context."""
    own = device()
    if PRETENDED:
        _hold(os.getpid())
    else:
        torch.cuda.set_device(own)
        torch.zeros(1, device=own)
        torch.cuda.synchronize()
    return own


def _hold(pid: int) -> None:
    with open(os.path.join(PRETENDED, f"{_local_rank()}-{pid}"), "w"):
        pass


def synchronize() -> None:
    """Wait for the device."""
    if not PRETENDED:
        torch.cuda.synchronize()


def holds_device(pid: int) -> bool:
    """Return whether a process has a device open."""
    if PRETENDED:
        return any(name.endswith(f"-{pid}") for name in os.listdir(PRETENDED))
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            if os.readlink(os.path.join(folder, name)).startswith("/dev/nvidia"):
                return True
        except OSError:  # closed in between
            continue
    return False


def ancestors() -> list[int]:
    """Return the ancestors of this process that run Python or muster: spawner, agent, owner."""
    found, pid = [], os.getppid()
    while pid > 1:
        found.append(pid)
        with open(f"/proc/{pid}/stat") as stat:
            pid = int(stat.read().rpartition(")")[2].split()[1])
    return found


def is_forked() -> bool:
    """Return whether this worker was forked from a spawner that had imported torch."""
    with open("/proc/self/cmdline", "rb") as line, open(f"/proc/{os.getppid()}/maps") as maps:
        return b"\0spawner\0" in line.read() and "libtorch" in maps.read()


def used_bytes(*, peak: bool = False) -> int:
    """Return the bytes of this process's tensors on the device, now or at the peak."""
    if PRETENDED:
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def digest(tensors: Any) -> str:
    """Return the checksum of tensors, bit for bit."""
    import hashlib

    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(local(tensor).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def be_deterministic() -> None:
    """Make torch use deterministic kernels; the kit has set cuBLAS's workspace."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def kill_at(step: int, steps: str) -> None:
    """Kill this process at its attempt's step in `steps`, e.g. `3,17`."""
    wanted = [int(word) for word in steps.split(",") if word]
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt < len(wanted) and step == wanted[attempt]:
        say(killed=step)
        os.kill(os.getpid(), 9)


def run_out_of_memory() -> None:
    """Allocate more memory than exists; pretended faults quote logs in tests/incidents."""
    if PRETENDED:
        what = "Tried to allocate 1024.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 78.02 GiB is free."
        raise torch.OutOfMemoryError(f"CUDA out of memory. {what}")
    torch.empty(1 << 40, dtype=torch.uint8, device=device())


def assert_on_device() -> None:
    """Read past the end of a tensor in a kernel that checks it."""
    if PRETENDED:
        _fail("CUDA error: device-side assert triggered")
    table = torch.zeros(4, 4, device=device())
    torch.nn.functional.embedding(torch.tensor([99], device=device()), table)
    torch.cuda.synchronize()


def write_to_illegal_address() -> None:
    """Run a kernel that writes to an unmapped address, compiled here if this torch can.

    Source: torch/cuda/__init__.py, `_compile_kernel` (2.8 and newer).
    """
    if PRETENDED:
        _fail("CUDA error: an illegal memory access was encountered")
    compiler = getattr(torch.cuda, "_compile_kernel", None)
    if compiler is None:
        say(impossible="this torch can't compile a kernel at run time")
        sys.exit(0)
    source = 'extern "C" __global__ void stray(float *x) { x[1ll << 40] = 1.0f; }'
    compiler(source, "stray")((1, 1, 1), (1, 1, 1), (torch.zeros(1, device=device()),))
    torch.cuda.synchronize()


def stay_in_kernel() -> NoReturn:
    """Wait for a kernel that never ends."""
    if PRETENDED:
        import threading

        threading.Event().wait()
    torch.cuda._sleep(_ENDLESS_CYCLES)
    torch.cuda.synchronize()
    sys.exit("the kernel has ended")


def _fail(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what}\nCUDA kernel errors might be asynchronously reported at some other API call"
    )
