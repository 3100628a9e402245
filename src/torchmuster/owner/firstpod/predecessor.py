"""What a first pod that was made again finds in its record: an attempt that ended with the pod before it.

A pod that is told to end leaves a `run_ended`. Without one, something killed it: its container was out of memory, or its node
died. That spends a restart, as the loss of any other pod does; else a run whose rank 0 needs too much memory never ends.

A node that only seemed dead may still have the pod before, and comes back with it. So each first pod has a claim: doors of other pods
refuse the earlier of two (`node/pod/session.py`), and on a volume the earlier one finds the later one's. It then ends at once.
"""

import contextlib
import os
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field

from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model.failure import EndKind, WorkerEnd, describe
from torchmuster.model.liveness.lives import Lives, WhatFollows
from torchmuster.model.plan import RunPlan
from torchmuster.model.record.events import AttemptFailedEvent, AttemptStartedEvent, line_of
from torchmuster.model.record.run import RunRecord
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Circumstances, Result, explain_failure, final_exit_code
from torchmuster.net.secret import read_secret
from torchmuster.node.pod.lines import ask_pod
from torchmuster.node.pod.order import AGAIN_CODE, PodOrder
from torchmuster.node.pod.session import CLAIM_VARIABLE
from torchmuster.owner.resubmit import restarts_spent
from torchmuster.owner.views.record import record_of

_CLAIM_FILE = "first-pod.json"
_LOOK_S = 1.0  # at the claim on a volume
_HEED_S = 3.0  # in which a first pod that still lives finds a later one's claim
_ASK_EVERY_S = 5.0
_ASK_S = 5.0
_ASKED = 2  # other pods


@dataclass(slots=True)
class FirstPod:
    """Says to other pods, and on a volume, which first pod owns the run; ends this process when it is another one."""

    order: PodOrder
    key: str
    claim: str = field(default_factory=lambda: secrets.token_hex(16))

    def take(self) -> None:
        """Own it from now on; on a volume only after another one that still lives has had time to see that."""
        os.environ[CLAIM_VARIABLE] = self.claim
        if self.order.has_volume:
            with contextlib.suppress(OSError):  # of a full volume, which the run itself tells of
                self._write_claim()
        for work in (self._look, self._ask_others):
            threading.Thread(target=work, name="first-pod", daemon=True).start()

    def _write_claim(self) -> None:
        os.makedirs(self.order.folder, mode=0o700, exist_ok=True)
        noted, pod = atomic.read_json(self._path), os.environ.get("MUSTER_POD_UID")
        atomic.write_json(self._path, {"claim": self.claim, "pod": pod})
        if isinstance(noted, dict) and noted.get("pod") != pod:
            time.sleep(_HEED_S)  # noqa: TID251  # another machine's look at a file

    def release(self) -> None:
        """Leave nothing that the next first pod would wait for."""
        with contextlib.suppress(OSError):
            if self.order.has_volume and not self._is_replaced:
                os.unlink(self._path)

    @property
    def _path(self) -> str:
        return os.path.join(self.order.folder, _CLAIM_FILE)

    @property
    def _is_replaced(self) -> bool:
        noted = atomic.read_json(self._path)
        return isinstance(noted, dict) and noted.get("claim") != self.claim

    def _look(self) -> None:
        while self.order.has_volume:
            if self._is_replaced:
                sys.stderr.write("muster: another first pod has this run now: this one ends\n")
                sys.stderr.flush()
                os._exit(AGAIN_CODE)
            time.sleep(_LOOK_S)  # noqa: TID251  # another machine's claim

    def _ask_others(self) -> None:
        """Call some other pods again and again: the answer to a replaced owner ends this process."""
        while True:
            time.sleep(_ASK_EVERY_S)  # noqa: TID251  # other machines
            for index in range(1, min(self.order.num_pods, 1 + _ASKED)):
                host, secret = self.order.address(index), read_secret(self.key)
                ask_pod(host, self.order.port, secret, "true", _ASK_S)


def count_loss(run_dir: RunDir, plan: RunPlan) -> Result | None:
    """Note the end of an attempt that nobody has noted; return the run's result where no restart is left for another.

    Raises:
        OSError: The record can't be written.
    """
    start = _unfinished(record_of(run_dir))
    if start is None:
        return None
    most = plan.limits.max_restarts
    lives = Lives(most, restarts_spent(run_dir, most))
    is_last = lives.after_loss() is WhatFollows.SPENT
    cause = _end_of(start)
    told = AttemptFailedEvent(
        attempt=cause.attempt,
        what=f"{cause.node}: {describe(cause)}",
        cause=cause,
        restarts_left=None if is_last else lives.left,
    )
    with open(run_dir.events, "a") as file:
        file.write(line_of(told))
    return _result(cause, start, lives.spent, plan) if is_last else None


def _unfinished(record: RunRecord) -> AttemptStartedEvent | None:
    """Return the start of the last attempt, where nothing says how it ended."""
    last = record.attempts[-1] if record.attempts else None
    return last.start if last is not None and last.ended is None else None


def _end_of(start: AttemptStartedEvent) -> WorkerEnd:
    return WorkerEnd(
        attempt=start.attempt,
        rank=0,
        local_rank=0,
        node=start.nodes[0].node if start.nodes else "the first pod",
        kind=EndKind.NODE_LOST,
        asked=False,
        elapsed_s=0.0,
        signum=9,
        detail="this pod, the first one, ended in the middle of the attempt",
    )


def _result(cause: WorkerEnd, start: AttemptStartedEvent, spent: int, plan: RunPlan) -> Result:
    known = Circumstances(
        world_size=start.world_size,
        attempt=cause.attempt,
        restarts_spent=spent,
        max_restarts=plan.limits.max_restarts,
        same_as=None,
        is_final=False,
        early_ranks=(),
        restart_hint=plan.restart_hint,
        log_path=None,
    )
    return Result(
        run_id=plan.run_id,
        state=RunState.FAILED,
        exit_code=final_exit_code(cause, first_cause_code=plan.first_cause_code),
        attempts=cause.attempt + 1,
        restarts_spent=spent,
        elapsed_s=0.0,
        report=explain_failure(cause, [cause], known),
        cause=cause,
    )
