"""Reads and checks the command line of `muster plan`; reports all its errors at once."""

import os
import re
from dataclasses import dataclass
from typing import Any

from torchmuster.core.model.text import nearest
from torchmuster.core.spec.problems import parse_timeout
from torchmuster.diagnose.plan.advice import BETWEEN, INSIDE, parse_link
from torchmuster.diagnose.plan.scaling import NetworkLink
from torchmuster.errors import ManyErrors, UsageError

SIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
DEFAULT_NODES = 16
DEFAULT_SPLIT = "1:2"
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([KMBGT]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_MAX_PARAMS = 1e14


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The checked command line; None for values that are to be measured."""

    num_params: float | None
    gradient: str | None
    step_s: float | None
    split: tuple[float, float, float]
    network: NetworkLink | None
    inside: NetworkLink | None
    engine: str | None
    num_nodes: int
    per_node: int
    adapters: int
    accumulation: int
    is_sharded: bool
    command: tuple[str, ...]


def read_plan_request(given: dict[str, Any]) -> PlanRequest:
    """Read and check the command line.

    Raises:
        ManyErrors: All errors in the command line.
    """
    found: list[UsageError] = []
    num_params = _read_params(given["params"], found)
    step_s = _read_time(given["step_time"], found)
    split = _read_split(given["split"] or DEFAULT_SPLIT, found)
    network = _read_link("--network", given["network"], found)
    inside = _read_link("--inside", given["inside"], found)
    _check_work(given, found)
    _check_network(given, found)
    if found:
        raise ManyErrors(found)
    return PlanRequest(
        num_params=num_params,
        gradient=given["dtype"],
        step_s=step_s,
        split=split,
        network=network,
        inside=inside,
        engine=given["engine"],
        num_nodes=given["nodes"] or DEFAULT_NODES,
        per_node=given["per_node"],
        adapters=given["adapters"],
        accumulation=given["accumulate"],
        is_sharded=given["fsdp"],
        command=given["command"],
    )


def _check_work(given: dict[str, Any], found: list[UsageError]) -> None:
    if given["script"]:
        doubled = [name for name in ("params", "step_time", "split") if given[name]]
        for name in doubled:
            option = f"--{name.replace('_', '-')}"
            found.append(UsageError(f"--script measures what {option} gives", where=option))
        if not given["command"]:
            fix = "muster plan --network 25GbE --script train.py ARGS"
            found.append(UsageError("--script needs a script after it", fix=fix))
        elif not os.path.isfile(given["command"][0]):
            what = f"there is no script `{given['command'][0]}`"
            found.append(UsageError(what, where="--script"))
        return
    if given["command"]:
        words = " ".join(given["command"])
        fix = f"to measure a script: muster plan ... --script {words}"
        found.append(UsageError(f"unexpected argument: `{words}`", fix=fix))
    missing = [
        option
        for option, name in (("--params", "params"), ("--step-time", "step_time"))
        if not given[name]
    ]
    if missing:
        what = f"the model is not known: {' and '.join(missing)} missing"
        fix = "--params 7e9 --step-time 470ms, or --script train.py ARGS"
        found.append(UsageError(what, fix=fix))


def _check_network(given: dict[str, Any], found: list[UsageError]) -> None:
    if given["engine"]:
        for option, name in (("--network", "network"), ("--inside", "inside")):
            if given[name]:
                what = f"--on measures what {option} gives"
                found.append(UsageError(what, where=option, fix="leave out one of them"))
        if (given["nodes"] or 0) < 2:
            what = "a network is measured between two nodes or more"
            found.append(UsageError(what, where="--nodes", fix=f"--on {given['engine']} --nodes 2"))
        return
    if not given["network"]:
        fix = "--network 25GbE (names: muster plan --list), or --on NAME --nodes 2 to measure it"
        found.append(UsageError("the network is not known", fix=fix))
    if given["per_node"] > 1 and not given["inside"]:
        what = f"what joins the {given['per_node']} GPUs of a node is not known"
        fix = "--inside nvlink4 (names: muster plan --list)"
        found.append(UsageError(what, where="--gpus-per-node", fix=fix))


def _read_params(text: str | None, found: list[UsageError]) -> float | None:
    if text is None:
        return None
    match = _COUNT.fullmatch(text.strip())
    count = float(match.group(1)) * _FACTORS[match.group(2).upper()] if match else 0.0
    if not 1 <= count <= _MAX_PARAMS:
        what = f"`{text}` is not a valid number of parameters"
        found.append(UsageError(what, where="--params", fix="--params 7e9, 7B or 350M"))
    return count


def _read_time(text: str | None, found: list[UsageError]) -> float | None:
    if text is None:
        return None
    seconds = parse_timeout(text)
    if not seconds:
        what = f"`{text}` is not a valid duration"
        found.append(UsageError(what, where="--step-time", fix="--step-time 470ms"))
    return seconds


def _read_split(text: str, found: list[UsageError]) -> tuple[float, float, float]:
    """Return the fractions of a step (forward, backward, optimizer), which sum to 1."""
    words = text.split(":")
    try:
        parts = [float(word) for word in words]
    except ValueError:
        parts = []
    sums = 0 < sum(parts) < float("inf") and min(parts) >= 0
    if len(parts) not in (2, 3) or not sums or parts[1] == 0:
        what = f"`{text}` does not split a step"
        why = "it takes forward:backward or forward:backward:optimizer, and a backward pass"
        found.append(UsageError(what, where="--split", why=why, fix="--split 1:2:0.1"))
        return (0.0, 1.0, 0.0)
    whole = sum(parts)
    forward, backward, *rest = (part / whole for part in parts)
    return forward, backward, rest[0] if rest else 0.0


def _read_link(option: str, text: str | None, found: list[UsageError]) -> NetworkLink | None:
    if text is None:
        return None
    known = BETWEEN if option == "--network" else INSIDE
    names = {name.lower(): name for name in known}
    if text.lower() in names:
        return known[names[text.lower()]].link
    link = parse_link(text)
    if link is None:
        near = nearest(text.lower(), names)
        fix = f"did you mean `{names[near]}`?" if near else f"{option} 25Gbit/s,50us"
        why = "it is neither RATE,LATENCY nor a name of `muster plan --list`"
        found.append(UsageError(f"`{text}` is not a known link", where=option, why=why, fix=fix))
    return link
