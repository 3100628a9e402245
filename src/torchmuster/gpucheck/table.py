"""All checks, the most important first."""

import itertools
import json
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchmuster.core.node.kernel import visible_gpus
from torchmuster.gpucheck.kit import (
    SCRIPTS,
    FailedError,
    FinishedCommand,
    GpuMachine,
    ImpossibleError,
    Kit,
    in_use,
)
from torchmuster.launcher.engines.allocation import find_own_job

# Numbers: starts and recovery compared with torchrun, interleaved; the cost of a step; a GPT of 100
# M parameters. The first docstring line of a check is printed as its promise.


def starts(num: int) -> Callable[[Kit], None]:
    """Return a check that times the start of `num` ranks on one GPU, by muster and by torchrun."""

    def check(kit: Kit) -> None:
        words = ["backend=nccl" if num == 1 else "backend=gloo"]
        took: dict[str, list[float]] = {"muster": [], "torchrun": []}
        for _ in range(1 if kit.quick else 3):
            took["muster"].append(
                _until_sum(kit.muster(["--nproc-per-node", num], "group", *words))
            )
            took["torchrun"].append(_until_sum(kit.torchrun(num, "group", *words)))
        _compare(kit, took, "first all-reduce, s")

    return check


def _until_sum(ran: FinishedCommand) -> float:
    sums = ran.all("total")
    ran.expect(sums == [4.0 * len(sums)] * len(sums), f"the sums are {sums}")
    return float(max(ran.all("done")) - ran.began)


def _compare(kit: Kit, took: dict[str, list[float]], what: str) -> None:
    medians = {side: statistics.median(values) for side, values in took.items()}
    for side, value in medians.items():
        kit.measures[f"{side}, {what}"] = round(value, 3)
    kit.measures["torchrun / muster"] = round(medians["torchrun"] / medians["muster"], 2)


def recovery(kit: Kit) -> None:
    """From SIGKILL of the rank that holds the device to its next step, by both launchers."""
    words = ("kind=plain", "steps=8", "kills=4")
    took: dict[str, list[float]] = {"muster": [], "torchrun": []}
    for _ in range(1 if kit.quick else 3):
        took["muster"].append(
            _gap(kit.muster(["--nproc-per-node", 1, "--max-restarts", 1], "train", *words))
        )
        took["torchrun"].append(_gap(kit.torchrun(1, "train", *words, restarts=1)))
    _compare(kit, took, "SIGKILL to the next step, s")


def _gap(ran: FinishedCommand) -> float:
    ran.expect(ran.all("killed") == [4], f"killed at steps {ran.all('killed')}, not at 4")
    dead = max(fact["at"] for fact in ran.facts if "killed" in fact)
    return float(min(f["at"] for f in ran.facts if "step" in f and f["at"] > dead) - dead)


def steps(kit: Kit) -> None:
    """What the library adds to a step of 10 ms."""
    ran = kit.muster(["--nproc-per-node", 1], "train", "kind=plain", "steps=200", "every=100000", "pause_s=0.01")  # fmt: skip
    at = [fact["at"] for fact in ran.facts if "step" in fact]
    made = ran.all("step")
    ran.expect(len(made) >= 200 and made == list(range(len(made))), f"not 200 steps: {made}")
    step_s = statistics.median(b - a for a, b in itertools.pairwise(at))
    kit.measures["a step of 10 ms and its work, ms"] = round(1000 * step_s, 2)


def language_model(kit: Kit) -> None:
    """A GPT of about 100 M parameters for 30 s: plain, with the library, and with the library and a kill."""
    seconds, size = (3.0, "small") if kit.quick else (30.0, "large")
    rates: dict[str, float] = {}
    for side, more in (
        ("plain", []),
        ("library", ["library=1"]),
        ("killed", ["library=1", "kill=1"]),
    ):
        words = [f"seconds={seconds}", f"size={size}", *more]
        ran = kit.muster(["--nproc-per-node", 1, "--max-restarts", 1], "gpt", *words)
        last = max((f["step"] for f in ran.facts if "step" in f and not f["attempt"]), default=0)
        expected = [last + 1] if side == "killed" else []
        ran.expect(ran.all("killed") == expected, f"killed at {ran.all('killed')}, not {expected}")
        counted = {fact["step"]: fact["at"] for fact in ran.facts if fact.get("step", 0) > 0}
        ran.expect(counted, "no step was made")
        begin = min(counted.values(), default=0.0)  # neither the start nor the first step counts
        rates[side] = sum(begin < at <= begin + seconds for at in counted.values()) / seconds
        kit.measures[f"{side}, useful steps per s"] = round(rates[side], 2)
    kit.measures["library / plain"] = round(rates["library"] / rates["plain"], 3)
    kit.measures["killed / plain"] = round(rates["killed"] / rates["plain"], 3)


# NCCL and Gloo on the device.


def nccl_refuses(kit: Kit) -> None:
    """Two ranks on one GPU: NCCL refuses, and muster says why."""
    ran = kit.muster(
        ["--nproc-per-node", 2, "--max-restarts", 0],
        "group",
        "backend=nccl",
        env={"CUDA_VISIBLE_DEVICES": kit.machine.names[0]},
        ok=False,
    )
    ran.expect_text("use the same GPU", "as many ranks on a node as it has GPUs")


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


# Which rank gets which device, and what happens if ranks outnumber devices.


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
    ran = kit.muster(["--nproc-per-node", num, "--max-restarts", 0], "use", "shared", ok=False)
    words = "has no GPU" if num > 2 else "share one GPU"
    ran.expect_text(words, "share_gpus")
    ran.expect_text(f"{num} workers on a node with {num - 1} GPU")


def shared_device(kit: Kit) -> None:
    """By `share_gpus=True` ranks share a device, and Gloo sums."""
    num = len(kit.machine.gpus) + 1
    ran = kit.muster(["--nproc-per-node", num], "use", "shared", "share")
    ran.expect(ran.one("total") == num, f"the sum over {num} ranks is {ran.one('total')}")
    ran.expect(ran.one("backend") == "gloo", f"the backend is {ran.one('backend')}")


def parts_of_gpus(kit: Kit) -> None:
    """A worker on each part of a GPU (MIG)."""
    if not any(word.startswith("MIG-") for word in visible_gpus()):
        raise ImpossibleError("no part of a GPU (MIG) is visible here")
    by_rank(kit)


# Faults on the device: the culprit is named, the device freed, and the run continues or ends.


_ONE = ("--nproc-per-node", 1)
_ONCE = (*_ONE, "--max-restarts", 0)
_HANG_S = 12
# In the driver's format. Source: NVIDIA, "XID Errors", and logs in tests/incidents.
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
    ran.expect_text("SIGKILL in rank 0")


def out_of_memory(kit: Kit) -> None:
    """Out of memory is named, with what was asked for and what was free."""
    ran = _fault(kit, "memory")
    ran.expect_text("1024.00 GiB", "out of memory")
    ran.expect(re.search(r"free", ran.text), "it does not say what was free")


def device_assert(kit: Kit) -> None:
    """A device-side assert is named."""
    _fault(kit, "assert").expect_text("device-side assert")


def illegal_address(kit: Kit) -> None:
    """An illegal address is named."""
    _fault(kit, "address").expect_text("illegal memory access")


def _fault(kit: Kit, kind: str) -> FinishedCommand:
    ran = kit.muster(_ONCE, "use", "fault", kind, ok=False)
    ran.expect_text("rank 0")
    return ran


def hang_in_collective(kit: Kit) -> None:
    """A rank that stays away from a collective is named, and the run ends; with NCCL where there are two GPUs."""
    nccl = len(kit.machine.gpus) > 1
    env = None if nccl else {"CUDA_VISIBLE_DEVICES": kit.machine.names[0]}
    options = ["--nproc-per-node", 2, "--max-restarts", 0, "--hang-timeout", f"{_HANG_S}s"]
    words = [f"backend={'nccl' if nccl else 'gloo'}", "hangs=1", f"limit_s={10 * _HANG_S}"]
    ran = kit.muster(options, "group", *words, env=env, ok=False, limit_s=4 * _HANG_S)
    ran.expect_text("rank 1", "stood still")


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
    ran.expect_text("Xid 79")


# Fork: the parent has imported torch without touching CUDA; its children use CUDA.


_PRELOAD = "torchmuster.gpucheck.scripts.early"


def _expect_total(ran: FinishedCommand, total: float) -> None:
    ran.expect(ran.one("total") == total, f"the result is {ran.one('total')}, not {total}")


def child_uses_device(kit: Kit) -> None:
    """A forked worker multiplies on the device, and no process above it has one open."""
    ran = kit.muster(_ONE, "use", "plain")
    _expect_total(ran, 8192.0)
    ran.expect(ran.one("forked"), "the worker is no fork of a process with torch")
    if not ran.one("holds_itself"):
        raise ImpossibleError("this kernel does not show which process has a device open")
    held = ran.one("held_above")
    ran.expect(not held, f"processes {held} above the worker have a device open")


def early_initialisation(kit: Kit) -> None:
    """CUDA that is initialised before the fork is refused with the line that did it, and the workers start afresh."""
    ran = kit.muster([*_ONE, "--preload", _PRELOAD], "use", "plain", env={"GPUCHECK_EARLY": "init"})
    ran.expect_text("initialised CUDA in the spawner", "early.py:")
    _expect_total(ran, 8192.0)
    ran.expect(not ran.one("forked"), "the worker was forked all the same")


def early_questions(kit: Kit) -> None:
    """`is_available()` and `device_count()` before the fork: the worker uses its device, forked or not."""
    for act in ("available", "count"):
        options = [*_ONE, "--preload", _PRELOAD]
        ran = kit.muster(options, "use", "plain", env={"GPUCHECK_EARLY": act})
        _expect_total(ran, 8192.0)
        forked = ran.one("forked")
        ran.expect(forked or "in the spawner" in ran.text, f"{act}: not forked, without a reason")


def pinned_memory(kit: Kit) -> None:
    """Pinned memory in a forked worker, copied without waiting."""
    ran = kit.muster(_ONE, "use", "pinned")
    ran.expect(ran.one("is_pinned"), "the memory is not pinned")
    ran.expect(abs(ran.one("total") / (2**39 - 2**19) - 1) < 1e-3, f"wrong: {ran.one('total')}")


def graphs(kit: Kit) -> None:
    """A CUDA graph is captured and replayed in a forked worker."""
    _expect_total(kit.muster(_ONE, "use", "graph"), 3072.0)


def compiled(kit: Kit) -> None:
    """`torch.compile` in a forked worker."""
    ran = kit.muster(_ONE, "use", "compiled", ok=None)
    if ran.code and "compiler" in ran.text and "FailedError to find" in ran.text:
        raise ImpossibleError("this machine has no C compiler")
    ran.expect(ran.code == 0, "it did not succeed")
    _expect_total(ran, 3072.0)


# Tools on the device: verified steps, replay, `top`, `doctor`, sweep members that share a GPU.


def verified_steps(kit: Kit) -> None:
    """`--verify-every` on two simulated nodes that share a device: no false alarm."""
    name = kit.machine.names[0]
    ran = kit.muster(
        ["--nodes", 2, "--nproc-per-node", 1, "--verify-every", 4],
        "train",
        "kind=plain",
        "steps=12",
        "share=1",
        env={"CUDA_VISIBLE_DEVICES": f"{name},{name}"},
    )
    ran.expect_text("bit for bit the same")


def replay(kit: Kit) -> None:
    """`muster replay` makes the step again whose loss was NaN, and finds it."""
    words = ("kind=plain", "steps=12", "on_nan=stop", "nan_at=6")
    kit.muster(["--nproc-per-node", 1, "--max-restarts", 0], "train", *words, ok=False)
    ran = kit.command(["replay", "last", "--no-debugger"])
    ran.expect_text("step 7", "NaN")


def top(kit: Kit) -> None:
    """The GPU columns of `muster top` show what nvidia-smi shows."""
    if kit.quick:
        raise ImpossibleError("nvidia-smi does not know a pretended GPU")
    script = os.path.join(SCRIPTS, "train.py")
    words = ["--detach", "--nproc-per-node", 1, script, "kind=plain", "steps=4000", "pause_s=0.05"]
    kit.command(["run", *words])
    try:
        for _ in range(60):
            shown = _json(kit.command(["top", "last", "--json"]).text)
            reported = [mib for mib in (shown.get("sample") or {}).get("gpu_mib", []) if mib]
            if reported:
                return expect_use(reported[0], in_use(kit.machine)[0] >> 20)
            time.sleep(0.5)  # noqa: TID251 - the sample of another process is waited for
        raise FailedError(f"`muster top` shows no memory of a GPU: {shown}")
    finally:
        kit.command(["cancel", "last"])


def expect_use(shown_mib: int, smi_mib: int) -> None:
    """Fail unless `muster top` shows the same memory use as nvidia-smi."""
    if abs(shown_mib - smi_mib) > smi_mib / 10 + 64:
        raise FailedError(f"`muster top` shows {shown_mib} MiB in use, nvidia-smi {smi_mib}")


def doctor(kit: Kit) -> None:
    """`muster doctor` has the GPUs that nvidia-smi has."""
    if kit.quick:
        raise ImpossibleError("nvidia-smi does not know a pretended GPU")
    expect_gpus(_json(kit.command(["doctor", "--json", "--no-job"]).text), kit.machine)


def expect_gpus(facts: Any, machine: GpuMachine) -> None:
    """Fail unless `muster doctor --json` lists the same GPUs and driver as nvidia-smi."""
    (node,) = facts["nodes"]
    shown = (node["num_gpus"], node["gpu"] or "", node["driver"])
    first = machine.gpus[0]
    if shown[0] != len(machine.gpus) or first.name not in shown[1] or shown[2] != machine.driver:
        raise FailedError(
            f"`muster doctor` shows {shown}; nvidia-smi {first.name}, {machine.driver}"
        )


def _json(text: str) -> Any:
    try:
        return json.loads(text[text.find("{") :])
    except ValueError:
        raise FailedError(f"not JSON: {text[-500:]}") from None


def per_gpu(kit: Kit) -> None:
    """`muster sweep --per-gpu 2`: two members share a GPU, and each sees one."""
    script = os.path.join(SCRIPTS, "use.py")
    options = ["--grid", "x=1,2", "--per-gpu", 2, "--style", "env"]
    name = kit.machine.names[0]
    ran = kit.command(
        ["sweep", *options, script, "--", "where"], env={"CUDA_VISIBLE_DEVICES": name}
    )
    ran.expect(ran.code == 0, "the sweep did not succeed")
    ran.expect("2 slots" in ran.text, "two members did not share the GPU")
    ran.expect(ran.all("visible") == [[name], [name]], f"the members see {ran.all('visible')}")


# The training library and its snapshots on the device: a run killed at random steps ends with the
# weights of an undisturbed run.


_STEPS = 24
_GIB = 1 << 30


def exact_resume(kind: str) -> Callable[[Kit], None]:
    """Return a check of one kind of training: killed twice at random, same bits at the end."""

    def check(kit: Kit) -> None:
        kills = f"{kit.draw.randint(2, _STEPS - 8)},{kit.draw.randint(_STEPS - 7, _STEPS - 1)}"
        kit.measures["killed at steps"] = kills
        plain = kit.muster(_ONE, "train", f"kind={kind}", f"steps={_STEPS}")
        killed = _killed_run(kit, f"kind={kind}", f"steps={_STEPS}", f"kills={kills}")
        expect_same(kit, plain, killed, f"kind={kind}", f"steps={_STEPS}")

    return check


def _killed_run(kit: Kit, *words: str) -> FinishedCommand:
    """Return a run whose worker was killed and that resumed from a snapshot."""
    ran = kit.muster([*_ONE, "--max-restarts", 5], "train", *words)
    kills, resumed = ran.all("killed"), ran.all("resumed")
    ran.expect(len(resumed) == len(kills) + 1, f"{len(kills)} kills, begun {len(resumed)} times")
    for killed, begun in zip(kills, resumed[1:], strict=True):
        ran.expect(0 < begun <= killed, f"killed at step {killed}, it went on from step {begun}")
    return ran


def expect_same(kit: Kit, plain: FinishedCommand, killed: FinishedCommand, *words: str) -> None:
    """Fail unless the weights are equal, or as close as those of two undisturbed runs."""
    if plain.one("weights") == killed.one("weights"):
        kit.measures["bit for bit"] = True
        return
    again = kit.muster(_ONE, "train", *words)
    spread = abs(plain.one("norm") - again.one("norm"))
    away = abs(plain.one("norm") - killed.one("norm"))
    kit.measures |= {"bit for bit": False, "spread of the norm": spread, "away by": away}
    same = plain.one("weights") == again.one("weights")
    if same or away > 2 * spread:
        killed.fail(
            f"the weights differ from those of the undisturbed run by {away:g} in their norm;"
            f" two undisturbed runs by {spread:g}"
        )


def on_device(kit: Kit) -> None:
    """What is loaded from a snapshot lies on the device at once."""
    ran = kit.muster(
        [*_ONE, "--max-restarts", 1], "snapshot", f"bytes={_size(kit, _GIB)}", "steps=8", "kill=6"
    )
    kinds = set(ran.all("kind"))
    wanted = "cpu" if kit.quick else "cuda"
    ran.expect(kinds == {wanted}, f"the weights are on {kinds}, not on {wanted}")
    ran.expect(ran.all("resumed") == [0, 4], f"begun at steps {ran.all('resumed')}, not 0 and 4")
    ran.expect(ran.one("first") == 4.0, f"the loaded value is {ran.one('first')}, not 4")
    kit.measures["load of 1 GiB, s"] = round(ran.one("load_s"), 3)


def costs(kit: Kit) -> None:
    """A snapshot of 1 GiB is copied through pinned memory: how long the loop stands, and what it takes on the device."""
    size = _size(kit, _GIB)
    ran = kit.muster(_ONE, "snapshot", f"bytes={size}", "steps=40")
    ran.expect(ran.one("last") == 40.0, f"the value is {ran.one('last')}, not 40")
    more = ran.one("more_bytes")
    ran.expect(more < size // 2, f"the copy takes {more} bytes more on the device, of {size}")
    kit.measures |= {
        "step, s": round(ran.one("step_s"), 4),
        "stall of the loop, s": round(ran.one("stall_s"), 4),
        "step while it is written, s": round(ran.one("busy_step_s"), 4),
        "more on the device, MiB": more >> 20,
    }


def in_memory(kit: Kit) -> None:
    """Snapshots in memory outlive the worker that held the device."""
    kill = kit.draw.randint(4, 16)
    words = ("kind=plain", f"steps={_STEPS}", "every=1000", "memory=1")
    plain = kit.muster(_ONE, "train", *words)
    killed = kit.muster([*_ONE, "--max-restarts", 2], "train", *words, f"kills={kill}")
    begun = killed.all("resumed")[-1]
    killed.expect(kill - 2 <= begun <= kill, f"killed at step {kill}, gone on from step {begun}")
    expect_same(kit, plain, killed, *words)


def ten_gigabytes(kit: Kit) -> None:
    """10 GB at once: saved and loaded, where device, memory and disk have room."""
    size = _size(kit, 10 * _GIB)
    if not kit.quick:
        free = kit.machine.gpus[0].memory_bytes - kit.machine.gpus[0].used_bytes
        if free < 2 * size:
            raise ImpossibleError(
                f"the device has {free >> 30} GiB free, and {2 * size >> 30} are needed"
            )
        if (room := shutil.disk_usage(kit.scratch).free) < 3 * size:
            raise ImpossibleError(
                f"{kit.scratch} has room for {room >> 30} GiB, needed are {3 * size >> 30}"
            )
    ran = kit.muster(
        [*_ONE, "--max-restarts", 1], "snapshot", f"bytes={size}", "steps=8", "kill=6", limit_s=170
    )
    ran.expect(ran.one("first") == 4.0, f"the loaded value is {ran.one('first')}, not 4")
    kit.measures["load, s"] = round(ran.one("load_s"), 3)


def _size(kit: Kit, num_bytes: int) -> int:
    return 1 << 20 if kit.quick else num_bytes


CORRECTNESS, BENCH = "correctness", "bench"


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """One check.

    Attributes:
        run: Raises `FailedError` or `ImpossibleError`.
        limit_s: Time limit, several times what it needs on one GPU.
        num_gpus: Number of GPUs that it needs.
        says: Its promise; empty: the first line of the docstring of `run`.
    """

    name: str
    run: Callable[[Kit], None]
    limit_s: float = 60.0
    part: str = CORRECTNESS
    num_gpus: int = 1
    says: str = ""

    @property
    def promise(self) -> str:
        """What holds if it passes."""
        return self.says or (self.run.__doc__ or "").strip().splitlines()[0]


def _exact(kind: str, what: str) -> GpuCheck:
    says = f"{what}: killed twice, resumed, the weights of the undisturbed run."
    return GpuCheck(f"train.{kind}", exact_resume(kind), 120.0, says=says)


def _starts(num: int) -> GpuCheck:
    says = f"Start of {num} rank{'s' if num > 1 else ''} on one GPU, beside torchrun."
    return GpuCheck(f"bench.start-{num}", starts(num), 120.0, BENCH, says=says)


CHECKS = (
    GpuCheck("fork.child", child_uses_device),
    GpuCheck("nccl.alone", nccl_alone),
    _exact("plain", "float32"),
    GpuCheck("faults.kill", killed),
    GpuCheck("devices.by-rank", by_rank),
    GpuCheck("fork.early", early_initialisation),
    _exact("bf16", "bf16"),
    _exact("fp16", "fp16 with a gradient scaler"),
    _exact("dropout", "Dropout from the device's generator"),
    _exact("fsdp", "FSDP2 on one rank"),
    GpuCheck("snapshots.device", on_device),
    GpuCheck("snapshots.costs", costs),
    GpuCheck("snapshots.memory", in_memory, 120.0),
    GpuCheck("faults.memory", out_of_memory),
    GpuCheck("faults.assert", device_assert),
    GpuCheck("faults.address", illegal_address),
    GpuCheck("hang.collective", hang_in_collective, 75.0),
    GpuCheck("hang.kernel", hang_in_kernel, 75.0),
    GpuCheck("nccl.refuses", nccl_refuses),
    GpuCheck("gloo.shares", gloo_shares),
    GpuCheck("devices.uuid", by_uuid),
    GpuCheck("devices.lists", schedulers_lists),
    GpuCheck("devices.too-many", too_many_ranks),
    GpuCheck("devices.shared", shared_device),
    GpuCheck("fork.questions", early_questions),
    GpuCheck("fork.pinned", pinned_memory),
    GpuCheck("fork.graph", graphs),
    GpuCheck("fork.compile", compiled, 120.0),
    _exact("compile", "`torch.compile`"),
    GpuCheck("tools.verify", verified_steps),
    GpuCheck("tools.replay", replay),
    GpuCheck("tools.top", top),
    GpuCheck("tools.doctor", doctor),
    GpuCheck("tools.per-gpu", per_gpu),
    GpuCheck("faults.xid", xid, num_gpus=0),
    GpuCheck("snapshots.10-gb", ten_gigabytes, 180.0),
    GpuCheck("nccl.gpus", nccl_over_gpus, num_gpus=2),
    GpuCheck("nccl.nodes", nccl_over_nodes),
    GpuCheck("devices.mig", parts_of_gpus),
    _starts(1),
    _starts(2),
    _starts(8),
    GpuCheck("bench.recovery", recovery, 120.0, BENCH),
    GpuCheck("bench.step", steps, part=BENCH),
    GpuCheck("bench.gpt", language_model, 180.0, BENCH),
)
