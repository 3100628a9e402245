"""What the pod of a sweep's member is told: an order and a plan as of a run in one pod, made in the pod from those of the sweep."""

import contextlib
import os
from collections.abc import Mapping

from torchmuster.files import atomic
from torchmuster.model import codec
from torchmuster.model.plan import RunPlan
from torchmuster.node.pod.order import (
    CALL_FILE,
    CODE_FILE,
    ORDER_FILE,
    PLAN_FILE,
    SWEEP_FILE,
    PodOrder,
    own_index,
    read_order,
)
from torchmuster.spec.sweep_plan import SweepPlan

_JOB_FILE = "pods-job"  # in the run directory: the Job that writes the record


def read_own(path: str, environment: Mapping[str, str]) -> tuple[PodOrder, RunPlan | None]:
    """Return what this pod is told, of a sweep what its member is told, and the plan of the run; None for a group's.

    Args:
        path: Of the order that came.
        environment: Of the pod.

    Raises:
        CodecError: It can't be read.
    """
    order, brought = read_order(path), os.path.dirname(path)
    if order.is_sweep and order.members:
        index = own_index(environment)
        plain = atomic.read_json(os.path.join(brought, SWEEP_FILE))
        sweep = codec.from_plain(SweepPlan, plain)
        return order.of_member(index), sweep.member_plan(order.members[index])
    plain = atomic.read_json(os.path.join(brought, PLAN_FILE))
    return order, codec.from_plain(RunPlan, plain) if plain is not None else None


def place_member(path: str, environment: Mapping[str, str], folder: str) -> str:
    """Write order and plan of this pod's member into a folder beside links to what else came; return the order's path.

    On a volume there may be the record of an earlier Job of the sweep: how the member ended then is forgotten.
    """
    order, plan = read_own(path, environment)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for name in (CODE_FILE, CALL_FILE):
        brought = os.path.join(os.path.dirname(path), name)
        if os.path.exists(brought) and not os.path.lexists(os.path.join(folder, name)):
            os.symlink(brought, os.path.join(folder, name))
    atomic.write_json(os.path.join(folder, PLAN_FILE), codec.to_plain(plan))
    atomic.write_json(os.path.join(folder, ORDER_FILE), codec.to_plain(order))
    _forget_earlier_end(order)
    return os.path.join(folder, ORDER_FILE)


def _forget_earlier_end(order: PodOrder) -> None:
    run_dir = order.run_dir
    os.makedirs(run_dir.path, mode=0o700, exist_ok=True)
    note = os.path.join(run_dir.path, _JOB_FILE)
    if atomic.read_json(note) == {"job": order.job}:
        return
    for left in (order.ended, run_dir.result, run_dir.cancelled):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)
    atomic.write_json(note, {"job": order.job})
