"""Tools on the device: verified steps, replay, what `top` and `doctor` show, members that share a GPU."""

import json
import os
import time
from typing import Any

from torchmuster.gpucheck.device import GpuMachine, in_use
from torchmuster.gpucheck.kit import SCRIPTS, FailedError, ImpossibleError, Kit


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
    ran.expect_words("bit for bit the same")


def replay(kit: Kit) -> None:
    """`muster replay` makes the step again whose loss was NaN, and finds it."""
    words = ("kind=plain", "steps=12", "on_nan=stop", "nan_at=6")
    kit.muster(["--nproc-per-node", 1, "--max-restarts", 0], "train", *words, ok=False)
    ran = kit.command(["replay", "last", "--no-debugger"])
    ran.expect_words("step 7", "NaN")


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
            told = [mib for mib in (shown.get("sample") or {}).get("gpu_mib", []) if mib]
            if told:
                return expect_use(told[0], in_use(kit.machine)[0] >> 20)
            time.sleep(0.5)  # noqa: TID251 - the sample of another process is waited for
        raise FailedError(f"`muster top` shows no memory of a GPU: {shown}")
    finally:
        kit.command(["cancel", "last"])


def expect_use(shown_mib: int, smi_mib: int) -> None:
    """Fail unless `muster top` shows the memory that nvidia-smi shows."""
    if abs(shown_mib - smi_mib) > smi_mib / 10 + 64:
        raise FailedError(f"`muster top` shows {shown_mib} MiB in use, nvidia-smi {smi_mib}")


def doctor(kit: Kit) -> None:
    """`muster doctor` has the GPUs that nvidia-smi has."""
    if kit.quick:
        raise ImpossibleError("nvidia-smi does not know a pretended GPU")
    expect_gpus(_json(kit.command(["doctor", "--json", "--no-job"]).text), kit.machine)


def expect_gpus(told: Any, machine: GpuMachine) -> None:
    """Fail unless `muster doctor --json` has as many GPUs as nvidia-smi, with their name and driver."""
    (node,) = told["nodes"]
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
