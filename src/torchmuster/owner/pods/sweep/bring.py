"""What a sweep in pods brings along: its plan, the code, and what earlier Jobs of it have reached."""

import contextlib
import json
import os
from dataclasses import replace

from torchmuster.engines.kubernetes.dialect import name_of
from torchmuster.engines.kubernetes.wishes import DOOR_PORT, home_of, keeps_runs
from torchmuster.errors import UsageError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir, short_id
from torchmuster.model import codec
from torchmuster.model.display.text import show_size
from torchmuster.model.job import JobRequest
from torchmuster.node.pod import order as orders
from torchmuster.node.pod.order import PodOrder
from torchmuster.owner.pods.bring import SECRET_BYTES, check_way, pack_code, pack_order
from torchmuster.owner.sweep.members import member_dir
from torchmuster.owner.sweep.owner import NOT_AGAIN
from torchmuster.owner.views.record import read_events
from torchmuster.owner.views.sweep_view import SweepView
from torchmuster.spec.sweep_plan import SweepPlan

_MOST_BYTES = (
    SECRET_BYTES // 4
)  # of the plan and of what is settled: torchmuster takes half of a Secret
_EARLIER = "earlier"
_OF_MEMBER = ("member_started", "member_measured", "member_ended")


def bring_sweep(plan: SweepPlan, run_dir: RunDir, job: JobRequest) -> JobRequest:
    """Return the job with the files that the pods of a sweep need; they are written into the run directory.

    Raises:
        UsageError: The code or the plan is too large, or the script is not in its folder.
    """
    folder = os.path.join(run_dir.path, "pods")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    settled = os.path.join(folder, orders.SETTLED_FILE)
    more = {orders.SWEEP_FILE: run_dir.sweep}
    if os.path.exists(settled):
        more[orders.SETTLED_FILE] = settled
    more_bytes = sum(map(os.path.getsize, more.values()))
    if more_bytes > _MOST_BYTES:
        raise UsageError(
            f"the values of {len(plan.members):,} members take {show_size(more_bytes)}, pods take {show_size(_MOST_BYTES)}",
            where="--grid",
            why="they travel in the Secret of the sweep, which has 1 MiB with torchmuster itself",
            fix="several sweeps, or shorter values",
        )
    code = pack_code(plan.run.program, folder)
    order = PodOrder(
        run_id=plan.run_id,
        job=job.name,
        num_pods=job.num_nodes,
        port=int(dict(job.own_keys).get("door_port", DOOR_PORT)),
        home=home_of(job),
        code_root=code.root,
        code_sha="",
        has_volume=keeps_runs(job),
        is_sweep=True,
    )
    order, brings = pack_order(order, folder, run_dir, more_bytes)
    if order.code_bytes is not None:
        check_way(job, "the code", code.describe())
    return replace(job, brings=tuple({**brings, **more}.items()))


def job_again(view: SweepView, run_dir: RunDir, request: JobRequest) -> JobRequest:
    """Return the job for the members of a sweep that have not succeeded; what the others have left stays.

    Args:
        view: Where the sweep stands.
        run_dir: Its folder here.
        request: What was asked for the last time.
    """
    plan = view.plan
    again = [m.number for m in view.members if m.state not in NOT_AGAIN]
    _keep_settled(run_dir, {m.number for m in view.members} - set(again))
    _set_aside(run_dir, plan, again)
    earlier = len(os.listdir(os.path.join(run_dir.path, _EARLIER)))
    slots = min(len(again), request.num_nodes)
    chunk = replace(request.chunks[0], num_nodes=slots)
    # The pods of the Job before may still end, and keep its name.
    name = name_of(short_id(plan.run_id), slots, more=f"-{earlier}")
    return replace(request, name=f"{name}-{earlier}", chunks=(chunk,), brings=())


def _keep_settled(run_dir: RunDir, settled: set[int]) -> None:
    """Leave only what the record says of these members: it is the beginning of the next Job's."""
    lines = [
        json.dumps(event)
        for event in read_events(run_dir.events)
        if event.get("event") in _OF_MEMBER and event.get("member") in settled
    ]
    text = "".join(f"{line}\n" for line in lines).encode()
    atomic.replace_file(os.path.join(run_dir.path, "pods", orders.SETTLED_FILE), text, mode=0o600)


def _set_aside(run_dir: RunDir, plan: SweepPlan, again: list[int]) -> None:
    """Keep what the last Job has left of members that run again, and forget how it ended."""
    base = os.path.join(run_dir.path, _EARLIER)
    os.makedirs(base, exist_ok=True)
    folder = os.path.join(base, str(len(os.listdir(base)) + 1))
    os.makedirs(folder)
    for number in again:
        member = member_dir(run_dir, plan, number).path
        with contextlib.suppress(FileNotFoundError):
            os.rename(member, os.path.join(folder, os.path.basename(member)))
    for path in (run_dir.result, run_dir.events):
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, os.path.join(folder, os.path.basename(path)))
    settled = os.path.join(run_dir.path, "pods", orders.SETTLED_FILE)
    with open(settled, "rb") as file:  # until the copy of the new record comes
        atomic.replace_file(run_dir.events, file.read())
    for path in (run_dir.cancelled, os.path.join(run_dir.path, "pods", "mirror.json")):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def rewrite_plan(plan: SweepPlan, run_dir: RunDir, slots: int) -> SweepPlan:
    """Return the plan with as many slots as there are pods, as its folder has it from now on."""
    plan = replace(plan, slots=slots)
    atomic.write_json(run_dir.sweep, codec.to_plain(plan))
    return plan
