"""The ports that a group's tasks agree on: `{{port}}` and `{{port:NAME}}` stand for the same numbers in all of them."""

import json
import random

from torchmuster.core.model import codec
from torchmuster.core.model.tokens import find_tokens
from torchmuster.workflow.plan import GroupPlan, WorkflowPlan

_NUM_PORT_CANDIDATES = 256


def choose_ports(
    plan: WorkflowPlan, group: GroupPlan, free: list[tuple[int, ...]]
) -> dict[str, int]:
    """Return a port for each name.

    Args:
        plan: The workflow's.
        group: The group.
        free: What each of its agents has found free of the candidates; those that found nothing left out.
    """
    names = port_names(group)
    if not names:
        return {}
    common = set.intersection(*map(set, free)) if free else set[int]()
    candidates = port_candidates(plan, group)
    chosen = [port for port in candidates if port in common] or list(candidates)
    return dict(zip(names, chosen, strict=False))


def port_names(group: GroupPlan) -> list[str]:
    """Return the names in `{{port:NAME}}` of a group's texts; the empty one for `{{port}}`."""
    names: dict[str, None] = {}
    for token in find_tokens(json.dumps(codec.to_plain(group), ensure_ascii=False)):
        if token.kind == "port":
            names[token.argument or ""] = None
    return list(names)


def port_candidates(plan: WorkflowPlan, group: GroupPlan) -> tuple[int, ...]:
    """Return ports that all tasks of a group try, in the same order: not those that the kernel gives to callers."""
    if not port_names(group):
        return ()
    low, high = _ephemeral_range()
    usable = [port for port in range(10240, 65536) if not low <= port <= high]
    # Not for secrets: all tasks must come to the same list.
    chooser = random.Random(f"{plan.uuid}/{group.name}")
    return tuple(chooser.sample(usable, min(_NUM_PORT_CANDIDATES, len(usable))))


def _ephemeral_range() -> tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
            return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999
