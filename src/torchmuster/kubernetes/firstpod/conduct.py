"""The owner of a run in its first pod: does what `muster run` does on one machine.

    conduct-pods --key FILE --order FILE

It opens sessions with the pods as ssh does with hosts, so it does not depend on the client, and
survives the loss of another pod. Its exit code is the pod's: 0, 113 for a final failure, 75 when
this pod is taken away. The code archive comes from a Secret, an earlier run's volume, or the client.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import resource
import secrets
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from torchmuster.core import plugs
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model import codec, owner_policy
from torchmuster.core.model.events import AttemptFailedEvent, AttemptStartedEvent, line_of
from torchmuster.core.model.failure import EndKind, WorkerEnd, describe
from torchmuster.core.model.narration import shortened
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import render_report, report_of_error, show_transfer
from torchmuster.core.model.verdict import Circumstances, Result, explain_failure, final_exit_code
from torchmuster.core.net.address import read_secret
from torchmuster.core.owner.create import (
    failed_before_start,
    holds_snapshots,
    link_snapshots,
    write_owner,
)
from torchmuster.core.owner.parts import Deadline
from torchmuster.core.owner.record import next_attempt, read_events, read_lines, read_result
from torchmuster.core.owner.session import EarlyStop
from torchmuster.core.owner.supervise import RunOwner
from torchmuster.errors import ChannelError, MusterError
from torchmuster.kubernetes.firstpod.others import PodWait, RecordReplicas
from torchmuster.kubernetes.node import order as orders
from torchmuster.kubernetes.node.call import PodConnections, ask_pod, connections_of, end_replaced
from torchmuster.kubernetes.node.order import (
    AGAIN_CODE,
    CLAIM_VARIABLE,
    FINAL_CODE,
    NUM_FILES_KEY,
    VALUES_KEY,
    PodOrder,
    PodWords,
)
from torchmuster.kubernetes.node.record import arriving_folder
from torchmuster.launcher.engines.ssh import SshEngine, SshOptions
from torchmuster.launcher.engines.ssh_command import SshHost
from torchmuster.launcher.engines.ssh_host import in_parallel, make_bundle
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.jobs.jobs import cancelled_before_start
from torchmuster.launcher.model.run import record_of
from torchmuster.launcher.node.remote.files import CodeOutputs, make_mark
from torchmuster.launcher.owner.resubmit import restarts_spent
from torchmuster.launcher.views.account import find_saved

# How a replacement of the first pod handles the attempt that ended with its predecessor.
#
# A pod that is asked to end records `run_ended`. Without that, something killed it: its container
# ran out of memory, or its node died. This spends a restart, like the loss of any other pod;
# otherwise a run whose rank 0 needs too much memory would never end.
#
# A node that only seemed dead may come back with the earlier pod. So each first pod has a claim:
# other pods refuse the earlier of two (`kubernetes/node/serve.py`), and on a volume the earlier
# one finds the later one's claim. It then ends at once.


_CLAIM_FILE = "first-pod.json"
_LOOK_S = 1.0  # how often to check the claim on a volume
_CLAIM_WAIT_S = 3.0  # for an earlier first pod that is still alive to see the later one's claim
_ASK_EVERY_S = 5.0
_ASK_S = 5.0
_NUM_ASKED = 2  # other pods


@dataclass(slots=True)
class FirstPodClaim:
    """Claims the run for this first pod and ends this process when another pod claims it later."""

    order: PodOrder
    key: str
    claim: str = field(default_factory=lambda: secrets.token_hex(16))

    def take(self) -> None:
        """Claim the run; on a volume give an earlier first pod that still lives time to see it."""
        os.environ[CLAIM_VARIABLE] = self.claim
        if self.order.has_volume:
            with contextlib.suppress(OSError):  # on a full volume; the run itself reports that
                self._write_claim()
        for work in (self._look, self._ask_others):
            threading.Thread(target=work, name="first-pod", daemon=True).start()

    def _write_claim(self) -> None:
        os.makedirs(self.order.folder, mode=0o700, exist_ok=True)
        noted, pod = atomic.read_json(self._path), os.environ.get("MUSTER_POD_UID")
        atomic.write_json(self._path, {"claim": self.claim, "pod": pod})
        if isinstance(noted, dict) and noted.get("pod") != pod:
            time.sleep(_CLAIM_WAIT_S)  # noqa: TID251  # another machine's look at a file

    def release(self) -> None:
        """Remove the claim, so that the next first pod does not wait for this one."""
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
                end_replaced()
            time.sleep(_LOOK_S)  # noqa: TID251  # another machine's claim

    def _ask_others(self) -> None:
        """Call some other pods repeatedly: their answer to a replaced owner ends this process."""
        while True:
            time.sleep(_ASK_EVERY_S)  # noqa: TID251  # other machines
            for index in range(1, min(self.order.num_pods, 1 + _NUM_ASKED)):
                host, secret = self.order.address(index), read_secret(self.key)
                ask_pod(host, self.order.port, secret, "true", _ASK_S)


def record_cut_off_attempt(run_dir: RunDir, plan: RunPlan) -> Result | None:
    """Record the end of an attempt that was cut off; return the run's result if no restart is left.

    Raises:
        OSError: The record can't be written.
    """
    attempts = record_of(run_dir).attempts
    if not attempts or attempts[-1].ended is not None:
        return None
    start = attempts[-1].start
    most = plan.limits.max_restarts
    lives = owner_policy.RestartBudget(most, restarts_spent(run_dir, most))
    is_last = lives.after_loss() is owner_policy.AfterLoss.SPENT
    cause = _end_of(start)
    attempt_failed = AttemptFailedEvent(
        attempt=cause.attempt,
        what=f"{cause.node}: {describe(cause)}",
        cause=cause,
        restarts_left=None if is_last else lives.left,
    )
    with open(run_dir.events, "a") as file:
        file.write(line_of(attempt_failed))
    return _result(cause, start, lives.spent, plan) if is_last else None


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


_MESSAGE_FILE = "/dev/termination-log"
MOST_MESSAGE_BYTES = 4096
_MOST_VALUES_BYTES = 1024
_END_S = 10.0


def main(arguments: list[str]) -> int:
    """Own the run of these pods to its end; return the pod's exit code."""
    return conduct(arguments, PodOwner)


def conduct(arguments: list[str], kind: "type[OwnerInPod[Any]]") -> int:
    """Run an owner of this kind in a first pod from its command line; return the exit code."""
    words = codec.from_arguments(PodWords, arguments)
    order = orders.read_order(words.order)
    _allow_many_files()
    voice = TerminalVoice()
    voice.start()
    first = FirstPodClaim(order, words.key)
    try:
        first.take()
        return kind(order, words.key, words.order, voice).run()
    finally:
        first.release()
        voice.flush(5.0)


def _allow_many_files() -> None:
    """Raise the limit of open files to its maximum: a pod needs 7, the default is often 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


Ended = TypeVar("Ended")


@dataclass(slots=True)
class OwnerInPod(ABC, Generic[Ended]):
    """Owner in the first pod, from start to end, of a run or of a workflow group.

    Attributes:
        order: The order of its pods.
        key: The file of the pods' key.
        order_path: The file of the order, in the folder of files that the pod was given.
        voice: Writes to the pod's log.
        requests: The requests to stop: by the cluster, or by a user, who leaves a note.
        errors: Exceptions that end it with a report; any other is a bug, and the pod restarts its
            owner.
    """

    order: PodOrder
    key: str
    order_path: str
    voice: TerminalVoice
    requests: owner_policy.StopRequests = field(default_factory=owner_policy.StopRequests)
    errors: ClassVar[tuple[type[Exception], ...]] = (MusterError, OSError)

    @property
    def run_dir(self) -> RunDir:
        """Return the run directory in this pod."""
        return self.order.run_dir

    @property
    def brought(self) -> str:
        """Return the folder with the files that the pod was given."""
        return os.path.dirname(self.order_path)

    @property
    def is_cancelled(self) -> bool:
        """Say whether a user has asked to stop."""
        note = os.path.basename(self.run_dir.cancelled)
        return os.path.exists(os.path.join(self.order.folder, note))

    def run(self) -> int:
        """Own it to its end; return the pod's exit code."""
        signal.signal(signal.SIGTERM, self._take_stop)
        before = self.read() if os.path.exists(self.order.ended) else None
        if before is not None:
            return self.code_of(before)  # a predecessor was interrupted while it ended
        try:
            ended = self.own()
        except self.errors as error:
            known = as_muster_error(error)
            is_by_user = self.requests.count and self.is_cancelled
            ended = self._cancelled(known) if is_by_user else self.failed(known)
        except KeyboardInterrupt:
            if not self.requests.count:  # not by SIGTERM, which takes pods away
                self._note_stop(signal.SIGINT)
            ended = self.stopped()
        follows = self.requests.after_end(
            is_whole=self.is_whole(ended), is_cancelled=self.is_cancelled
        )
        if follows is owner_policy.AfterLoss.ELSEWHERE:
            self.set_aside()
            return AGAIN_CODE
        return self.end(ended)

    def _take_stop(self, *_: object) -> None:
        self._note_stop(signal.SIGTERM)
        raise KeyboardInterrupt  # there is no head yet to tell

    def _note_stop(self, signum: int) -> None:
        self.requests.ask(signum, time.monotonic())

    def _cancelled(self, error: MusterError) -> Ended:
        """Return the end after a user's cancellation and an error; prefer what was written."""
        self.voice.say(f"{error.what}: {error.why}" if error.why else error.what)
        written = self.read()
        return self.stopped() if written is None or self.is_whole(written) else written

    @abstractmethod
    def read(self) -> Ended | None:
        """Return the end that an earlier process of this pod recorded, if any."""

    @abstractmethod
    def own(self) -> Ended:
        """Conduct the run or group; return how it ended."""

    @abstractmethod
    def failed(self, error: MusterError) -> Ended:
        """Return the end after an error."""

    @abstractmethod
    def stopped(self) -> Ended:
        """Return the end of what was stopped before it began."""

    @abstractmethod
    def is_whole(self, ended: Ended) -> bool:
        """Say whether this end is final even if this pod was asked to stop."""

    @abstractmethod
    def set_aside(self) -> None:
        """Set a recorded end aside: another pod continues."""

    @abstractmethod
    def end(self, ended: Ended) -> int:
        """Record and report the end; return the pod's exit code."""

    @abstractmethod
    def code_of(self, ended: Ended) -> int:
        """Return the pod's exit code for an end."""


class PodOwner(OwnerInPod[Result]):
    """Owner of a run, in the first of its pods."""

    def read(self) -> Result | None:
        """Return the run's result."""
        return read_result(self.run_dir)

    def failed(self, error: MusterError) -> Result:
        """Return the result of a run that could not start in this pod."""
        return failed_before_start(self.run_dir, error.exit_code, report_of_error(error))

    def stopped(self) -> Result:
        """Return the result of a run that a user has cancelled."""
        return cancelled_before_start(self.run_dir)

    def is_whole(self, ended: Result) -> bool:
        """Say whether it succeeded: a failure may come from a worker whose pod was taken away."""
        return ended.state is RunState.SUCCEEDED

    def code_of(self, ended: Result) -> int:
        """Return the pod's exit code."""
        return 0 if ended.state is RunState.SUCCEEDED else FINAL_CODE

    def own(self) -> Result:
        """Conduct the run; return its result."""
        neighbours = RecordReplicas(
            self.order, connections_of(self.order, self.key).start, self.voice.say
        )
        plan = self._place_run(neighbours)
        if (lost := record_cut_off_attempt(self.run_dir, plan)) is not None:
            lost = replace(lost, elapsed_s=time.time() - _begun(self.run_dir))
            atomic.write_json(self.run_dir.result, codec.to_plain(lost))
            return lost
        deadline = self._deadline()
        engine, early = self._started(plan)
        try:
            self.voice.say(f"run on {', '.join(engine.used_names)}")
            neighbours.start()
            supervisor = RunOwner(engine, self.voice, deadline, early=early, requests=self.requests)
            result = asyncio.run(supervisor.run())
            engine.finish()
            return engine.localized(result)
        finally:
            neighbours.stop(is_taken_away=self.requests.count > 0)
            engine.abandon()

    def _started(self, plan: RunPlan) -> tuple[SshEngine, EarlyStop]:
        """Return the engine with agents in all places, and the stop requests recorded since.

        A pod that can't be used is a loss like any other: it spends a restart.

        Raises:
            MusterError: Too few pods came, or one can't be used and no restart is left.
        """
        most = plan.limits.max_restarts
        lives = owner_policy.RestartBudget(most, restarts_spent(self.run_dir, most))
        policy = owner_policy.OwnerPolicy(self.order.job, lives, self.requests)
        while True:
            pod_wait = PodWait(
                order=self.order,
                secret=read_secret(self.key),
                least=plan.min_nodes,
                most=plan.num_places,
                last_call_s=plan.limits.last_call_s,
                say=self.voice.say,
            )
            answer = asyncio.run(pod_wait.wait(plan.limits.join_timeout_s))
            engine, early = self._engine(plan, answer), EarlyStop()
            try:
                engine.start_all(
                    first_attempt=next_attempt(self.run_dir), restarts_spent=lives.spent
                )
            except ChannelError as error:
                if early.signum:
                    self._note_stop(early.signum)
                if policy.after_loss() is not owner_policy.AfterLoss.AGAIN:
                    raise
                signal.signal(signal.SIGTERM, self._take_stop)
                why = f": {error.why}" if error.why else ""
                self.voice.say(f"{error.what}{why}; the start is tried again ({lives.left} left)")
                continue
            return engine, early

    def _place_run(self, neighbours: RecordReplicas) -> RunPlan:
        """Create the run directory, or reuse one on a volume; return the plan for this pod."""
        run_dir = self.run_dir
        self.make_run_dir(neighbours)
        plain = atomic.read_json(os.path.join(self.brought, orders.PLAN_FILE))
        plan = codec.from_plain(RunPlan, plain)
        code = CodeOutputs(run_dir)
        if not code.is_there:
            wait_for_archive(self.order, self.brought, plan.limits.join_timeout_s, self.voice.say)
            code.unpack()
        program = code_copy.moved(plan.program, self.order.code_root, code.root)
        plan = replace(plan, program=program, nodes_return=True)
        atomic.write_json(run_dir.plan, codec.to_plain(plan))
        return plan

    def make_run_dir(self, neighbours: RecordReplicas) -> None:
        """Create the run directory, with the record that an earlier first pod has left."""
        run_dir = self.run_dir
        os.makedirs(run_dir.path, mode=0o700, exist_ok=True)  # sets the last one's mode only
        os.makedirs(run_dir.logs, exist_ok=True)
        os.makedirs(os.path.dirname(run_dir.agent_log("n1")), exist_ok=True)
        with open(self.key) as file:
            atomic.replace_file(run_dir.secret, file.read().encode(), mode=0o600)
        neighbours.find()
        make_mark(run_dir.path)
        write_owner(run_dir)
        self.set_aside()
        if self.order.continues is not None:
            link_earlier_snapshots(self.order, self.order.continues)
        call = os.path.join(self.brought, orders.CALL_FILE)
        if os.path.exists(call):
            with open(call, "rb") as brought:
                atomic.replace_file(run_dir.call, brought.read(), mode=0o600)

    def _engine(self, plan: RunPlan, answer: list[int]) -> SshEngine:
        order = self.order
        others = [index for index in range(order.num_pods) if index not in answer]
        names = tuple(order.host(index) for index in (*answer, *others))
        plan = replace(plan, node_names=names[: plan.num_places])
        code = CodeOutputs(self.run_dir).root
        return pods_engine(plan, self.run_dir, order, self.key, names, code, self.voice.say)

    def _deadline(self) -> Deadline | None:
        limit_s = self.order.time_limit_s
        if limit_s is None:
            return None
        ends_at = _begun(self.run_dir) + limit_s
        return Deadline(owner_policy.JobTime(self.order.warn_s, ends_at, ends_the_run=True))

    def set_aside(self) -> None:
        """Rename the result of an earlier process."""
        with contextlib.suppress(OSError):
            os.replace(self.run_dir.result, f"{self.run_dir.result}.{next_attempt(self.run_dir)}")

    def _without_vain_hint(self, result: Result) -> Result:
        """Remove the hint at `muster restart` if its snapshots go with the pods."""
        saved, report = find_saved(self.run_dir), result.report
        own = saved is not None and saved.folder.startswith(f"{self.order.home}/")
        if self.order.has_volume or not own or report is None or report.hint is None:
            return result
        parts = [part for part in report.hint.split("; ") if "muster restart" not in part]
        result = replace(result, report=replace(report, hint="; ".join(parts) or None))
        self._keep(result)
        return result

    def _keep(self, result: Result) -> None:
        with contextlib.suppress(OSError):  # on a full disk; the pod's last message has the result
            atomic.write_json(self.run_dir.result, codec.to_plain(result))

    def end(self, ended: Result) -> int:
        """Report the run's end in the pod's log, in its last message and in its record."""
        result = ended
        if result.report is not None and result.state is not RunState.SUCCEEDED:
            explained = plugs.find("ends", "explain")
            report = explained(result, self.run_dir) if explained is not None else None
            report = report or result.report
            result = replace(result, report=report)
            self._keep(result)
            self.voice.print(render_report(shortened(report, result, self.voice.shown)))
        result = self._without_vain_hint(result)
        counts = self.order.is_sweep and not self.order.has_volume
        more: dict[str, object] = {}
        if counts and (num_files := CodeOutputs(self.run_dir).num_made):
            more[NUM_FILES_KEY] = num_files
        if self.order.is_sweep and (values := newest_values(self.run_dir)) is not None:
            more[VALUES_KEY] = values
        leave_message(last_message(result, more))
        code = self.code_of(result)
        with contextlib.suppress(OSError):  # on a full disk; the pod's last message has the result
            atomic.write_json(self.order.ended, {"code": code})
        if self.order.keep_s:
            others = range(1, self.order.num_pods)
            end_pods(self.order, self.key, [self.order.address(index) for index in others])
        return code


def as_muster_error(error: Exception) -> MusterError:
    """Convert what ended an owner; an OSError means that the record can't be written."""
    if isinstance(error, MusterError):
        return error
    if not isinstance(error, OSError):
        return MusterError(str(error))
    return MusterError(
        f"the run's record can't be written: {error.strerror or error}",
        where=str(error.filename or "home"),
        fix="free some space on the volume of `home`, or name another one in the site",
    )


def link_earlier_snapshots(order: PodOrder, run_id: str) -> None:
    """Link the snapshots of the run that this one continues; keep an existing link.

    Raises:
        MusterError: The snapshots are gone from the volume; the run would silently begin at step 0.
    """
    run_dir = order.run_dir
    if os.path.lexists(run_dir.snapshots):
        return
    before = RunDir(os.path.join(order.home, "runs", run_id)).snapshots
    if order.saved_step is not None and not holds_snapshots(before):
        raise MusterError(
            f"the snapshots of {short_id(run_id)} are gone: the last was of step {order.saved_step}",
            where=before,
            why="the volume does not have them any more",
            fix="put them back, or type its command again to start over at step 0",
        )
    link_snapshots(run_dir, before)


def pods_engine(
    plan: RunPlan,
    run_dir: RunDir,
    order: PodOrder,
    key: str,
    names: Sequence[str],
    code_root: str,
    say: Callable[[str], None],
    output: str = "",
) -> SshEngine:
    """Return the engine that starts a run's agents by sessions with these pods; this is the first.

    Files in the folder `output` of the pods are copied to this pod.
    """
    limit_s = plan.limits.join_timeout_s
    domain = "" if order.hosts else order.job
    lines = PodConnections(secret=read_secret(key), port=order.port, domain=domain, wait_s=limit_s)
    bundle = make_bundle(("ssh",), [sys.executable], may_share=True)
    bundle = replace(
        bundle,
        connect_limit_s=limit_s,
        start=lines.start,
        hint_of=lambda host, _: f"`kubectl describe pod {host}` tells how it is",
    )
    wishes = SshOptions(
        hosts=tuple(SshHost(name=name) for name in names),
        where=f"pods of {order.job}",
        by_slots=False,
        head_port=order.head_port if order.group is None else 0,
        code_root=code_root,
        spares_first=order.group is None,
        passes_on=True,
        output=output,
    )
    return SshEngine(plan, run_dir, wishes, bundle, say)


def newest_values(run_dir: RunDir) -> dict[str, object] | None:
    """Return the last metrics event with each metric's newest value, if any and not too long."""
    values: dict[str, object] = {}
    last: dict[str, object] | None = None
    for event in read_lines(run_dir.training):
        if event.get("event") == "metrics" and isinstance(found := event.get("values"), dict):
            values |= found
            last = {**event, "values": values}
    return last if last is not None and len(json.dumps(last)) <= _MOST_VALUES_BYTES else None


def last_message(result: Result, more: Mapping[str, object] = MappingProxyType({})) -> str:
    """Return a result as JSON of at most 4,096 bytes, for a pod's termination message.

    Args:
        result: The result of the run.
        more: For a sweep member: more that only this pod has.
    """
    plain = {**codec.to_plain(result), **more}
    if result.cause is None or result.cause.kind is not EndKind.NODE_LOST:
        plain.pop("cause", None)  # it is long; for a lost pod the client asks the cluster
    report = plain.get("report") or {}
    while len(text := json.dumps(plain)) > MOST_MESSAGE_BYTES and report.get("because"):
        report["because"] = report["because"][:-1]
    return text if len(text) <= MOST_MESSAGE_BYTES else json.dumps({**plain, "report": None})


def end_pods(order: PodOrder, key: str, hosts: Sequence[str]) -> None:
    """End the other pods, as successes."""
    secret = read_secret(key)
    in_parallel(lambda host: ask_pod(host, order.port, secret, "kill -USR1 $PPID", _END_S), hosts)


def leave_message(text: str) -> None:
    """Write the message that Kubernetes keeps of an ended pod, if there is a file for it."""
    with contextlib.suppress(OSError), open(_MESSAGE_FILE, "r+") as file:
        file.write(text)


def _begun(run_dir: RunDir) -> float:
    """Return when the run began, maybe in another pod."""
    first = next(read_events(run_dir.events), None)
    return first.at if first is not None else time.time()


def engine_of_task(
    plan: RunPlan, run_dir: RunDir, say: Callable[[str], None], output: str
) -> "SshEngine":
    """Return the engine that starts a training run's agents over the pods of its task."""
    order = orders.read_order(os.environ[orders.ORDER_VARIABLE])
    key = os.environ[orders.KEY_VARIABLE]
    code = os.path.join(order.run_dir.path, "code")
    return pods_engine(plan, run_dir, order, key, plan.node_names, code, say, output)


# The code archive: from a Secret, an earlier run's volume, or the client.


_LOOK_FOR_CODE_S = 0.1
_SAY_EVERY_S = 4.5
_MOST_KEPT = 8


def wait_for_archive(
    order: PodOrder, brought: str, limit_s: float, say: Callable[[str], None]
) -> None:
    """Put the code archive into its place.

    Args:
        order: The order of the pods.
        brought: The folder with the files from Secrets.
        limit_s: How long the client may take to send the archive.
        say: Tells the user what the pod waits for.

    Raises:
        MusterError: The archive did not come within `limit_s`.
    """
    came = os.path.join(brought, orders.CODE_FILE)
    if os.path.exists(came):
        with open(came, "rb") as file:
            atomic.replace_file(order.archive, file.read())
        return
    if order.kept is not None and _use_kept(order, order.kept):
        return
    begun = say_at = time.monotonic()
    while not _is_whole(order.archive, order):
        now = time.monotonic()
        if now >= say_at:
            say(f"waiting for the code: the client sends it{_how_far(order, now - begun)}")
            say_at = now + _SAY_EVERY_S
        if now - begun > limit_s:
            raise MusterError(
                "the code did not come",
                where=order.archive,
                why="it is too large for Secrets, so the client sends it when the first pod runs",
                fix="keep muster running until it says that training begins, or put the code on a volume",
            )
        threading.Event().wait(_LOOK_FOR_CODE_S)
    if order.kept is not None:
        # On a full volume only the next run loses: it has to send the code again.
        with contextlib.suppress(OSError):
            _keep(order, order.kept)


def _how_far(order: PodOrder, elapsed_s: float) -> str:
    """Return how much of the archive has arrived; empty for nothing."""
    done = 0
    with contextlib.suppress(OSError):
        done = os.path.getsize(os.path.join(arriving_folder(order), orders.CODE_FILE))
    return f": {show_transfer(done, order.code_bytes, elapsed_s)}" if done else ""


def _use_kept(order: PodOrder, kept: str) -> bool:
    """Use the archive that an earlier run left on the volume; remove a damaged one.

    Raises:
        MusterError: It is damaged; the client saw it there, so it does not send it in this run.
    """
    if not os.path.exists(kept):
        return False
    if not _is_whole(kept, order):
        os.unlink(kept)
        raise MusterError(
            "the code that an earlier run left on the volume is damaged",
            where=kept,
            why="its content is not what its name says: it has been removed",
            fix="start the run again: it sends the code",
        )
    _link(kept, order.archive)
    os.utime(kept)  # the newest archives are kept
    return True


def _keep(order: PodOrder, kept: str) -> None:
    """Keep the archive for later runs, together with the newest others."""
    folder = os.path.dirname(kept)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _link(order.archive, kept)
    with os.scandir(folder) as entries:
        found = [e.path for e in entries if e.name.startswith(orders.KEPT_PREFIX)]
    for path in sorted(found, key=os.path.getmtime)[:-_MOST_KEPT]:
        os.unlink(path)


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the volume has no hard links."""
    part = f"{target}.{os.uname().nodename}.{os.getpid()}"
    try:
        os.link(source, part)
    except OSError:
        with open(source, "rb") as file:
            atomic.replace_file(part, file.read())
    os.replace(part, target)


def _is_whole(path: str, order: PodOrder) -> bool:
    try:
        if os.path.getsize(path) != order.code_bytes:
            return False
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == order.code_sha
    except OSError:
        return False
