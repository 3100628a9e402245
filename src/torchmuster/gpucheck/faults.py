"""Faults on the device: who dies is named, the device is free again, and the run goes on or ends with the cause."""

import os
import re

from torchmuster.gpucheck.kit import Kit, Ran

_ONE = ("--nproc-per-node", 1)
_ONCE = (*_ONE, "--max-restarts", 0)
_HANG_S = 12
# As the driver writes them. Source: NVIDIA, "XID Errors", and logs in tests/incidents.
_KERNEL_LOG = """\
[ 9721.113] NVRM: Xid (PCI:0000:3b:00): 79, pid=31337, GPU has fallen off the bus.
[ 9721.114] NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
"""


def killed(kit: Kit) -> None:
    """SIGKILL of the rank that holds the device: the time to its next step in parts."""
    ran = kit.muster([*_ONE, "--max-restarts", 1], "train", "kind=plain", "steps=12", "kills=6")
    dead = [fact["at"] for fact in ran.facts if "killed" in fact]
    after = [fact for fact in ran.facts if fact["attempt"] == 1]
    ran.expect(dead and after, "nothing was killed, or nothing followed")
    loaded = next(fact for fact in after if "loaded" in fact)
    stepped = next(fact for fact in after if "step" in fact)
    begun = loaded["loaded"] - loaded["load_s"]
    moments = [dead[0], begun, loaded["loaded"], stepped["at"]]
    ran.expect(moments == sorted(moments), f"the moments are not in order: {moments}")
    kit.measures |= {
        "death to the process group, s": round(moments[1] - moments[0], 3),
        "load, s": round(moments[2] - moments[1], 3),
        "first step, s": round(moments[3] - moments[2], 3),
    }
    ran.expect_words("SIGKILL in rank 0")


def out_of_memory(kit: Kit) -> None:
    """Out of memory is named, with what was asked for and what was free."""
    ran = _fault(kit, "memory")
    ran.expect_words("1024.00 GiB", "out of memory")
    ran.expect(re.search(r"free", ran.text), "it does not say what was free")


def device_assert(kit: Kit) -> None:
    """A device-side assert is named."""
    _fault(kit, "assert").expect_words("device-side assert")


def illegal_address(kit: Kit) -> None:
    """An illegal address is named."""
    _fault(kit, "address").expect_words("illegal memory access")


def _fault(kit: Kit, kind: str) -> Ran:
    ran = kit.muster(_ONCE, "fault", kind, ok=False)
    ran.expect_words("rank 0")
    return ran


def hang_in_collective(kit: Kit) -> None:
    """A rank that stays away from a collective is named, and the run ends; with NCCL where there are two GPUs."""
    nccl = len(kit.machine.gpus) > 1
    env = None if nccl else {"CUDA_VISIBLE_DEVICES": kit.machine.names[0]}
    options = ["--nproc-per-node", 2, "--max-restarts", 0, "--hang-timeout", f"{_HANG_S}s"]
    words = [f"backend={'nccl' if nccl else 'gloo'}", "hangs=1", f"limit_s={10 * _HANG_S}"]
    ran = kit.muster(options, "group", *words, env=env, ok=False, limit_s=4 * _HANG_S)
    ran.expect_words("rank 1", "stood still")


def hang_in_kernel(kit: Kit) -> None:
    """A rank that waits for a kernel without an end is named, ended, and holds no device afterwards."""
    options = [*_ONCE, "--hang-timeout", f"{_HANG_S}s"]
    words = ["kind=plain", "steps=12", "stuck_at=6"]
    ran = kit.muster(options, "train", *words, ok=False, limit_s=5 * _HANG_S)
    ran.expect(
        re.search(r"rank 0 .*(stood still|waited in)|the one rank waited", ran.text),
        "it does not name the rank that hangs",
    )


def xid(kit: Kit) -> None:
    """A fault of the hardware in the kernel's log is named, from a recorded one."""
    path = os.path.join(kit.scratch, "kernel.log")
    with open(path, "w") as file:
        file.write(_KERNEL_LOG if not os.environ.get("GPUCHECK_BREAK") else "quiet\n")
    ran = kit.command(["explain", path])
    ran.expect_words("Xid 79")
