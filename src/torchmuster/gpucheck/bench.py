"""Numbers: starts and recovery beside torchrun, interleaved, what a step costs, and a GPT of 100 M parameters."""

import itertools
import statistics
from collections.abc import Callable

from torchmuster.gpucheck.kit import Kit, Ran


def starts(num: int) -> Callable[[Kit], None]:
    """Return the check that times the start of some ranks on one GPU to their first all-reduce, by both launchers."""

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


def _until_sum(ran: Ran) -> float:
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


def _gap(ran: Ran) -> float:
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
