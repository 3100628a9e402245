"""Sweep members that are pods of one Indexed Job: what they bring, what they leave, their end.

Each pod is a run with one pod. The Job needs no client. A client copies here what running pods have
written; for ended pods it takes verdict and log from the cluster. A member with several pods is a
run of its own in pods, which a process of this machine owns.
"""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model import codec
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import AT_ONCE, Report, Result
from torchmuster.core.owner.create import create_member_dir, failed_before_start
from torchmuster.core.owner.record import next_attempt, read_result
from torchmuster.errors import MissingRecordError, MusterError
from torchmuster.kubernetes.engine.answers import Pod, read_objects, runs_of, views_of_elements
from torchmuster.kubernetes.engine.dialect import DIALECT, kubectl_for, name_of, place_of
from torchmuster.kubernetes.engine.manifest import (
    owned_by,
    secret_of,
)
from torchmuster.kubernetes.node import order as orders
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.pods import reach
from torchmuster.kubernetes.pods.bring import bring_code, bring_run, order_of
from torchmuster.kubernetes.pods.end import ask_owner_to_end, cancel_run, remove
from torchmuster.kubernetes.pods.losses import LostPodRemover, is_given_up
from torchmuster.kubernetes.pods.mirror import (
    RecordMirror,
    files_left_in,
    forget_copy,
    result_of_pod,
    values_left_by,
)
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.jobs.batch import JobFollower
from torchmuster.launcher.jobs.jobs import (
    WAITS,
    NeverStartsWatch,
    note_refusal,
    read_files,
    submit_job,
    submit_script,
    view_jobs,
)
from torchmuster.launcher.model.job import JobArray, JobRequest, JobState
from torchmuster.launcher.views.find import view_job
from torchmuster.multirun.sweep.arrays import MemberArray, SweepArrays, read_arrays, write_arrays
from torchmuster.multirun.sweep.members import lacks_files, member_dir
from torchmuster.multirun.sweep.plan import SweepPlan, read_sweep

# Restores deleted Secrets and Services of a run: replacement pods can't start without them.


_EVERY_S = 5.0
_KINDS = ("secret/", "service/")


@dataclass(slots=True)
class ObjectRestorer:
    """Checks the objects of one Job whenever its pods have changed.

    Attributes:
        job: The request, with the files that its pods bring along.
        say: Gets a message on each object that was restored.
    """

    job: JobRequest
    job_id: str
    watch: reach.PodWatch
    say: Callable[[str], None]
    _seen: int = -1
    _at: float = 0.0

    def look(self) -> None:
        """Create again what is missing, while the Job exists.

        Raises:
            EngineError: The cluster can't be queried, or refuses.
            OSError: A file for the pods is no longer here.
        """
        if self.watch.number == self._seen or time.monotonic() < self._at:
            return
        self._seen, self._at = self.watch.number, time.monotonic() + _EVERY_S
        name = place_of(self.job_id)[2]
        mine = [_name_of(one) for one in json.loads(DIALECT.script(self.job))["items"]]
        named = [one for one in mine if one.startswith(_KINDS)]
        words = ("get", f"jobs.batch/{name}", *named, "--ignore-not-found", "-o", "name")
        there = set(reach.ask(kubectl_for(self.job_id, *words)).split())
        missing = [one for one in named if one not in there]
        if f"job.batch/{name}" in there and missing:
            self._make(missing, name)

    def _make(self, missing: Sequence[str], name: str) -> None:
        job = reach.ask(kubectl_for(self.job_id, "get", f"jobs.batch/{name}", "-o", "json"))
        owner = owned_by(json.loads(job))["metadata"]
        wanted = [one.partition("/")[2] for one in missing if one.startswith("secret/")]
        brings = tuple(pair for pair in self.job.brings if secret_of(name, pair[0]) in wanted)
        files = {path: b"" for path, _ in self.job.brings}
        files |= read_files(
            replace(self.job, brings=brings)
        )  # files of an existing Secret may be gone here
        objects = json.loads(DIALECT.with_files(self.job, files))["items"]
        for one in (one for one in objects if _name_of(one) in missing):
            one["metadata"] |= owner
            reach.create(self.job_id, one)
            what = f"{one['kind']} {one['metadata']['name']}"
            self.say(f"the {what} was deleted by somebody: it was made again")


def _name_of(one: Mapping[str, Any]) -> str:
    return f"{one['kind'].lower()}/{one['metadata']['name']}"


_MOST_AT_ONCE = 8  # kubectl commands
_LOOK_S = 5.0  # without news about pods
_PAUSE_S = 1.0
_KEEP_CALL_S = 60.0


def submit_pods(
    plan: SweepPlan, run_dir: RunDir, request: JobRequest, members: Sequence[int], *, detach: bool
) -> str:
    """Submit members of a sweep as one Job; return its id. Remove the sweep's earlier Jobs.

    Raises:
        UsageError: The code or the plan is too large, or the script is not in its folder.
        EngineError: The cluster refuses.
    """
    before = read_arrays(run_dir)
    earlier = before.arrays if before is not None else ()
    for array in earlier:
        remove(array.job_id)
    noted = SweepArrays(engine=DIALECT.name, request=request, arrays=earlier)
    write_arrays(run_dir, noted)  # so that a restart can ask again if the cluster refuses
    job = bring_members(plan, run_dir, request, members, len(earlier), detach=detach)
    atomic.write_json(_job_file(run_dir), codec.to_plain(job))
    job_id = submit_script(job, run_dir.job_script, DIALECT)
    made = MemberArray(job_id=job_id, members=tuple(members))
    write_arrays(run_dir, replace(noted, arrays=(*earlier, made)))
    return job_id


def _job_file(run_dir: RunDir) -> str:
    return os.path.join(run_dir.path, "pods", "job.json")


def array_of(plan: SweepPlan, request: JobRequest, num_members: int, number: int) -> JobRequest:
    """Return the request for `num_members` members in the sweep's Job with this number.

    Each Job needs another name, as pods of earlier ones may still be ending.
    """
    more = f"-{number}" if number else ""
    name = name_of(short_id(plan.run_id), num_members, more) + more
    array = JobArray(size=num_members, parallel=min(plan.slots, num_members))
    # The time limit is for each member; the Job lasts as long as all of them.
    return replace(request, name=name, array=array, time_limit_s=None)


def bring_members(
    plan: SweepPlan,
    run_dir: RunDir,
    request: JobRequest,
    members: Sequence[int],
    number: int,
    *,
    detach: bool,
) -> JobRequest:
    """Return the job with the files that its pods need; write them into the run directory.

    Raises:
        UsageError: The code or the plan is too large, or the script is not in its folder.
    """
    job = array_of(plan, request, len(members), number)
    order = replace(
        order_of(job, plan.run_id),
        num_pods=len(members),
        time_limit_s=request.time_limit_s,
        # A slot does not wait for files; but a function's result is only in the record.
        keep_s=_KEEP_CALL_S if os.path.exists(run_dir.call) else 0.0,
        is_sweep=True,
        members=tuple(members),
    )
    files = {orders.SWEEP_FILE: run_dir.sweep}
    return bring_code(job, order, plan.run.program, run_dir, files, detach=detach)


@dataclass(slots=True)
class MemberCopies:
    """Copies what the pods of a sweep's newest Job write and leave.

    Attributes:
        job_id: The id of the Job.
        objects: The Job's Secret and Service; None on a machine that has not made them.
    """

    run_dir: RunDir
    plan: SweepPlan
    order: PodOrder
    job_id: str
    watch: reach.PodWatch
    objects: ObjectRestorer | None = None
    _never: NeverStartsWatch = field(default_factory=NeverStartsWatch)
    _is_closed: bool = False
    _mirrors: dict[int, RecordMirror] = field(default_factory=dict)

    @classmethod
    def of(cls, run_dir: RunDir) -> "MemberCopies | None":
        """Return the copies for a sweep; None if it is not in pods or has no Job yet."""
        plan, order, noted = read_sweep(run_dir), reach.pod_order(run_dir), read_arrays(run_dir)
        if plan is None or order is None or noted is None or not noted.arrays:
            return None
        job_id = noted.arrays[-1].job_id
        watch, objects = reach.PodWatch(job_id), None
        with contextlib.suppress(codec.CodecError):  # missing for another machine's sweep
            job = codec.from_plain(JobRequest, atomic.read_json(_job_file(run_dir)))
            objects = ObjectRestorer(job, job_id, watch, lambda _: None)
        return cls(run_dir, plan, order, job_id, watch, objects)

    def look(self, *, once: bool) -> None:
        """Save the ends of members; copy running ones, with `once` up to now, else while they run.

        Raises:
            EngineError: The cluster can't be queried.
        """
        open_ones = {index for index in range(len(self.order.members)) if self._is_open(index)}
        (argv,) = DIALECT.status_argv([self.job_id])
        objects = read_objects(reach.ask(argv)) if open_ones else []
        run, views = (
            runs_of(objects).get(self.order.job),
            views_of_elements(objects, self.order.job),
        )
        newest = run.newest() if run is not None else {}
        if not once and self.objects is not None:
            with contextlib.suppress(MusterError, OSError):
                self.objects.look()
        if not once and views and all(view.state in WAITS for view in views.values()):
            self._end_if_never(open_ones)
        with ThreadPoolExecutor(_MOST_AT_ONCE, "members") as pool:
            for index in open_ones & newest.keys():
                pod, state = newest[index], views[index].state
                if state in (JobState.SUCCEEDED, JobState.FAILED):
                    pool.submit(self._take_end, index, pod, state)
                elif is_given_up(pod):
                    pool.submit(self._release, index)
                elif pod.is_up and once:
                    pool.submit(self._catch_up, index)
                elif pod.is_up and index not in self._mirrors and not self._is_closed:
                    self._mirrors[index] = self._mirror(index)
                    self._mirrors[index].start()

    def close(self) -> None:
        """Stop copying and save the ends so far; remove the Job if all members are here.

        Raises:
            EngineError: The cluster can't be queried.
        """
        self._is_closed = True
        for mirror in self._mirrors.values():
            mirror.stop()
        self.look(once=False)
        indexes = range(len(self.order.members))
        if is_sweep_of_here(self.run_dir) and not any(
            self._is_open(index) or self._lacks(index) for index in indexes
        ):
            remove(self.job_id)

    def _end_if_never(self, open_ones: set[int]) -> None:
        """End a sweep whose pods can never start, e.g. without an image; report why."""
        view = view_jobs(DIALECT, [self.job_id]).get(self.job_id)
        report = self._never.judge(view, DIALECT)
        if report is None:
            return
        remove(self.job_id)
        for index in open_ones:
            member = self.place(index)
            result = failed_before_start(member, EngineError.exit_code, report)
            atomic.write_json(member.result, codec.to_plain(result))

    def _is_open(self, index: int) -> bool:
        folder = member_dir(self.run_dir, self.plan, self.order.members[index])
        mirror = self._mirrors.get(index)
        return read_result(folder) is None and not (mirror is not None and mirror.is_finishing)

    def _lacks(self, index: int) -> bool:
        """Say whether files of an ended member did not come here."""
        result = read_result(member_dir(self.run_dir, self.plan, self.order.members[index]))
        return result is not None and lacks_files(result)

    def _release(self, index: int) -> None:
        """Let the member on a dead node run on another one."""
        with contextlib.suppress(MusterError):
            LostPodRemover(self.run_of(index), lambda _: None).look(asks=True)
            if (mirror := self._mirrors.get(index)) is not None:
                mirror.look()

    def _catch_up(self, index: int) -> None:
        with contextlib.suppress(MusterError, OSError):
            self._mirror(index).catch_up()

    def _mirror(self, index: int) -> RecordMirror:
        takes = is_sweep_of_here(self.run_dir)
        return RecordMirror(self.run_of(index), self.watch, lambda _: None, takes=takes)

    def run_of(self, index: int) -> reach.RunInPods:
        """Return a member as a run in one pod, with its directory here."""
        return reach.RunInPods(self.place(index), self.order.of_member(index), self.job_id)

    def place(self, index: int) -> RunDir:
        """Return a member's directory, with the files that a client has for a run in pods."""
        number = self.order.members[index]
        member = member_dir(self.run_dir, self.plan, number)
        if not os.path.isdir(member.path):
            create_member_dir(self.plan.member_plan(number), self.run_dir)
        folder = os.path.join(member.path, "pods")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(self.run_dir.secret, "rb") as key:
            atomic.replace_file(member.secret, key.read(), mode=0o600)
        order = codec.to_plain(self.order.of_member(index))
        atomic.write_json(os.path.join(folder, orders.ORDER_FILE), order)
        atomic.write_json(os.path.join(member.path, reach.MEMBER_JOB), {"job_id": self.job_id})
        code = os.path.join(folder, orders.CODE_FILE)
        if not os.path.lexists(code):
            os.symlink(os.path.join("..", "..", "..", "pods", orders.CODE_FILE), code)
        return member

    def _take_end(self, index: int, pod: Pod, state: JobState) -> None:
        """Save verdict and log of an ended pod whose record has not come."""
        with contextlib.suppress(MusterError, OSError):
            if (mirror := self._mirrors.pop(index, None)) is not None:
                mirror.stop()
            member = self.place(index)
            values = values_left_by(pod)
            # With a volume the record itself can be fetched.
            if isinstance(values, dict) and not self.order.has_volume:
                with open(member.training, "a") as file:
                    file.write(f"\n{json.dumps(values)}\n")  # the line before may be incomplete
            result = result_of_pod(pod, member)
            if result is None:
                why = str(pod.end.reason) if pod.end is not None else "nobody has seen its end"
                report = Report(
                    error=f"its pod left no result: {why}", at=f"pod {pod.name} on {pod.node}"
                )
                result = failed_before_start(member, 1, report)
                if state is JobState.SUCCEEDED:
                    result = replace(result, state=RunState.SUCCEEDED, exit_code=0, report=None)
            with contextlib.suppress(EngineError):
                text = reach.log_of(self.job_id, pod).encode()
                # With a volume its record may continue an earlier one that is not complete here.
                newest = max(next_attempt(member), result.attempts, 1) - 1
                log = member.rank_log(newest, 0)
                os.makedirs(os.path.dirname(log), exist_ok=True)
                atomic.replace_file(log, text)
                forget_copy(member)
            if num_files := files_left_in(pod):
                result = _with_missing(result, num_files, pod)
            atomic.write_json(member.result, codec.to_plain(result))


def _with_missing(result: Result, num_files: int, pod: Pod) -> Result:
    """Add to a member's result that files went with its pod before anybody copied them."""
    missing = f"{num_files} file{'s' if num_files > 1 else ''} that it made did not come here, and went with pod {pod.name}"
    if result.state is not RunState.SUCCEEDED and result.report is not None:
        report = replace(result.report, because=(*result.report.because, missing))
        return replace(result, report=report)
    report = Report(
        error=missing,
        at=f"pod {pod.name} on {pod.node}, whose Job was not removed",
        because=("nobody followed the sweep when it ended, or its pod could not be reached",),
        hint="`claims` and `home` of the site keep files on a volume",
    )
    return replace(result, exit_code=MissingRecordError.exit_code, report=report)


def is_sweep_of_here(run_dir: RunDir) -> bool:
    """Say whether this machine has submitted the members of a sweep."""
    noted = read_arrays(run_dir)
    return noted is not None and noted.request is not None


def catch_up_members(run_dir: RunDir) -> None:
    """Copy here what the pods of a sweep have written and left; ignore errors."""
    copies = MemberCopies.of(run_dir)
    with contextlib.suppress(MusterError, OSError):
        if copies is not None:
            copies.look(once=True)


@contextlib.contextmanager
def members_copied(run_dir: RunDir) -> Iterator[None]:
    """Copy what the pods of a sweep write and leave, while the context is open."""
    copies, stopping = MemberCopies.of(run_dir), threading.Event()
    if copies is None:
        yield
        return

    def work() -> None:
        while not stopping.is_set():
            seen = copies.watch.number
            with contextlib.suppress(MusterError, OSError):
                copies.look(once=False)
            if not stopping.wait(_PAUSE_S):
                copies.watch.wait(seen, _LOOK_S)

    copies.watch.start()
    thread = threading.Thread(target=work, name="members", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        copies.watch.stop()
        thread.join(_LOOK_S)
        with contextlib.suppress(MusterError, OSError):
            copies.close()


def cancel_pods(run_dir: RunDir) -> None:
    """End all running members by deleting their Job: pods get SIGTERM and their grace.

    Raises:
        EngineError: The cluster refuses.
    """
    catch_up_members(run_dir)
    atomic.write_json(run_dir.cancelled, {"by": "muster cancel"})
    noted = read_arrays(run_dir)
    for array in noted.arrays[-1:] if noted is not None else ():
        remove(array.job_id)


def stop_pod(run_dir: RunDir, number: int) -> None:
    """End one member through its owner, as a deleted pod would be replaced.

    Raises:
        MusterError: Its pod does not run, or can't be reached.
    """
    copies = MemberCopies.of(run_dir)
    if copies is not None and number in copies.order.members:
        order = copies.order.of_member(copies.order.members.index(number))
        ask_owner_to_end(reach.RunInPods(run_dir, order, copies.job_id))


# A member with several pods: a run in pods that a process of this machine owns.


def note_request(sweep: RunDir, job: JobRequest) -> None:
    """Record that a sweep's members are runs in pods, and the request for each."""
    os.makedirs(os.path.join(sweep.path, "pods"), mode=0o700, exist_ok=True)
    atomic.write_json(sweep.member_request, codec.to_plain(job))


def own_member(plan: RunPlan, run_dir: RunDir) -> int:
    """Submit a sweep member, unless its Job still runs, and follow it to its end.

    Raises:
        MusterError: The cluster refuses it.
    """
    sweep = os.path.dirname(os.path.dirname(run_dir.path))
    plain = atomic.read_json(RunDir(sweep).member_request)
    voice = TerminalVoice()
    voice.start()
    for signum in (signal.SIGTERM, AT_ONCE):
        signal.signal(signum, lambda *_: _end(run_dir))
    try:
        with note_refusal(run_dir):
            job_id = _running_job(run_dir) or _submit(plan, run_dir, plain)
        follower = JobFollower(plan, run_dir, DIALECT, job_id, voice)
        try:
            result = asyncio.run(follower.follow())
        finally:
            follower.close()
    finally:
        voice.flush(5.0)
    return result.exit_code if result is not None else 1


def _end(run_dir: RunDir) -> None:
    """End the run on its cluster, in a thread; its follower then sees the result."""
    threading.Thread(target=cancel_run, args=(run_dir,), daemon=True).start()


def _running_job(run_dir: RunDir) -> str | None:
    """Return the Job that an earlier owner of the sweep submitted, if it has not ended."""
    view = view_job(run_dir)
    return reach.job_of(run_dir) if view is not None and not view.state.is_final else None


def _submit(plan: RunPlan, run_dir: RunDir, plain: object) -> str:
    request = codec.from_plain(JobRequest, plain)
    attempt = next_attempt(run_dir)
    more = f"-{attempt}" if attempt else ""  # the pods of an earlier Job may still be ending
    name = name_of(short_id(plan.run_id), request.num_nodes, more) + more
    job = replace(request, name=name, run_id=plan.run_id)
    return submit_job(bring_run(plan, run_dir, job, 0.0), run_dir, DIALECT)


class MemberPods:
    """Sweep members that are pods of one Job (`multirun/sweep/arrays.py`)."""

    submit = staticmethod(submit_pods)
    stop = staticmethod(stop_pod)
    cancel = staticmethod(cancel_pods)
