"""A workflow group in pods, for the workflow's owner: Jobs on a cluster, a copy of the record."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, WorkingFolder, short_id
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model import codec
from torchmuster.core.model.events import Stamped, fields_of
from torchmuster.core.model.text import report_of_error
from torchmuster.core.net import messages
from torchmuster.core.owner.record import Follow
from torchmuster.errors import MissingRecordError, MusterError
from torchmuster.kubernetes.engine.answers import Pod
from torchmuster.kubernetes.engine.dialect import DIALECT, job_id_of, place_of
from torchmuster.kubernetes.node.order import CREDENTIALS_FILE
from torchmuster.kubernetes.pods.bring_group import (
    bring_group,
    keeps_datasets_here,
    plan_group,
    with_outputs,
)
from torchmuster.kubernetes.pods.end import ask_owner_to_end, explain_missing, remove_jobs
from torchmuster.kubernetes.pods.losses import (
    LOSS_KNOWN_S,
    LostPodRemover,
    explain_group_loss,
    explain_task_loss,
)
from torchmuster.kubernetes.pods.members import ObjectRestorer
from torchmuster.kubernetes.pods.mirror import RecordMirror
from torchmuster.kubernetes.pods.reach import PodWatch, RunInPods, find_pod
from torchmuster.kubernetes.pods.starts import PodStarts, lacks_room
from torchmuster.launcher.jobs.jobs import (
    NeverStartsWatch,
    mark_views_stale,
    submit_script,
    view_jobs,
)
from torchmuster.launcher.model.job import JobState, JobView, describe_job
from torchmuster.workflow.head import task_messages
from torchmuster.workflow.plan import GroupInput, GroupPlan, WorkflowPlan
from torchmuster.workflow.record import (
    AgentLostEvent,
    GroupOutcome,
    State,
    TaskStartedEvent,
    note_group,
    read_outcome,
)
from torchmuster.workflow.task.data import upload_outputs
from torchmuster.workflow.task.setup import TaskFacts

if TYPE_CHECKING:
    from torchmuster.launcher.spec.site import Site

_LOOK_S = 0.2
_ASK_S = 1.0
_LATE_S = 15.0  # from the Job's end to that of its record


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupCopy:
    """What follows the Jobs of a group on this machine."""

    watch: PodWatch
    mirror: RecordMirror
    starts: PodStarts
    release: LostPodRemover
    objects: tuple[ObjectRestorer, ...]


@dataclass(slots=True)
class PodGroup:
    """One group: creates, follows and removes its Jobs.

    Attributes:
        hear: Gets the messages of head and tasks, as from a head on this machine.
    """

    plan: WorkflowPlan
    group: GroupPlan
    run_dir: RunDir
    site: "Site"
    hear: Callable[[messages.Message], None]
    say: Callable[[str], None]
    pid: int = 0  # there is no process on this machine
    _run: RunInPods | None = None
    _copy: _GroupCopy | None = None
    _job_ids: list[str] = field(default_factory=list)
    _set_id: str | None = None
    _never: NeverStartsWatch = field(default_factory=NeverStartsWatch)
    _reported: dict[str, str] = field(default_factory=dict)
    _waiting: dict[str, JobView] = field(default_factory=dict)
    _follow: Follow = field(init=False)
    _num_stops: int = 0
    _short_since: float | None = None
    _started: dict[str, float | None] = field(default_factory=dict)
    _lost: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    _is_gone: bool = False
    _lacks_record: bool = False

    def __post_init__(self) -> None:
        """Follow the record from its beginning."""
        self._follow = Follow(self.run_dir.group(self.group.name).events)

    async def start(self, start: GroupInput) -> tuple[str, int]:
        """Create the Jobs; the pods find their order in the Secrets.

        Raises:
            MusterError: The cluster refuses one of them; the earlier ones are removed.
        """
        del start  # replacement pods continue the attempt numbers by themselves
        await asyncio.to_thread(self._submit)
        return "", 0

    def _submit(self) -> None:
        pods = plan_group(self.plan, self.group, self.site)
        folder = self.run_dir.group(self.group.name)
        try:
            pods = bring_group(self.plan, self.group, self.run_dir, pods)
            for number, job in enumerate(pods.jobs):
                script = folder.job_script if not number else f"{folder.job_script}.{number}"
                self._job_ids.append(submit_script(job, script, DIALECT, self.say))
        except MusterError:
            self._remove()
            raise
        finally:
            # The credentials are in the Secret now, or not needed; delete the copy here.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder.path, "pods", CREDENTIALS_FILE))
        if len(pods.names) > len(pods.jobs):
            context, namespace, _ = place_of(self._job_ids[0])
            self._set_id = job_id_of(context, namespace, pods.jobs[0].name)
            self._job_ids = [job_id_of(context, namespace, name) for name in pods.names]
        noted = {
            "engine": DIALECT.name,
            "job_id": self._job_ids[0],
            "more": self._job_ids[1:],
            "set": self._set_id,
        }
        atomic.write_json(folder.job, noted)
        first, *more = self._job_ids
        run, watch = RunInPods(self.run_dir, pods.order, first), PodWatch(first, self.say)
        jobs = zip(pods.jobs, self._job_ids, strict=True) if self._set_id is None else ()
        self._run = run
        self._copy = _GroupCopy(
            watch=watch,
            mirror=RecordMirror(run, watch, self.say, self.say, takes=True),
            starts=PodStarts(pods.order, first),
            release=LostPodRemover(run, self.say, tuple(more)),
            objects=tuple(ObjectRestorer(job, at, watch, self.say) for job, at in jobs),
        )
        watch.start()
        self._copy.mirror.start()

    async def follow(self, address: tuple[str, int]) -> GroupOutcome:
        """Pass on what the group reports until it has ended; then remove it from the cluster."""
        del address
        loop = asyncio.get_running_loop()
        ask_at, ended_at, seen = 0.0, None, -1
        try:
            while (outcome := read_outcome(self.run_dir, self.group.name)) is None:
                self._pass_on()
                copy = self._copy
                if copy is not None and copy.watch.number != seen:
                    seen, ask_at = copy.watch.number, 0.0
                    mark_views_stale(DIALECT, self._job_ids, copy.watch.changed_at)
                if loop.time() >= ask_at:
                    is_over = await asyncio.to_thread(self._look)
                    ask_at = loop.time() + _ASK_S
                    ended_at = (ended_at or loop.time()) if is_over else None
                    if copy is not None and copy.mirror.is_finishing:
                        ended_at = None
                if ended_at is not None and loop.time() > ended_at + _LATE_S:
                    await asyncio.to_thread(self._end_without_record)
                await asyncio.sleep(_LOOK_S)
            self._pass_on()
            return await self._with_datasets(self._joined(outcome))
        finally:
            await asyncio.to_thread(self._remove)

    def _joined(self, outcome: GroupOutcome) -> GroupOutcome:
        """Add to the outcome why other Jobs' pods did not come; the first pod can't know."""
        if outcome.state is not State.FAILED_START_ERROR or outcome.report is None:
            return outcome
        said = tuple(map(describe_job, self._waiting.values()))
        if not said:
            return outcome
        report = replace(outcome.report, because=(*said, *outcome.report.because))
        return self._keep(replace(outcome, report=report))

    async def _with_datasets(self, outcome: GroupOutcome) -> GroupOutcome:
        """Make dataset versions from outputs that have come, if datasets are in a folder here."""
        if self._run is None or self._lacks_record or not keeps_datasets_here(self._run.order):
            return outcome
        completed = {one.task for one in outcome.tasks if one.state is State.COMPLETED}
        for task in (with_outputs(task, to_urls=False) for task in self.group.tasks):
            if not task.outputs or task.name not in completed:
                continue
            place = WorkingFolder(self.run_dir.task_folder(task.name))
            facts = TaskFacts(
                workflow=self.plan, group=self.group, task=task, attempt=0, place=place
            )
            try:
                stored = await upload_outputs(
                    task,
                    place,
                    lambda _: None,
                    succeeded=outcome.state is State.COMPLETED,
                    run_id=self.plan.run_id,
                    resolve=facts.resolve,
                )
            except MusterError as error:
                code, report = error.exit_code, report_of_error(error)
                return self._keep(
                    replace(outcome, state=State.FAILED, exit_code=code, report=report)
                )
            for sentence in (*stored.notes, *(f"{task.name}: {v}" for v in stored.versions)):
                self.say(sentence)
        return outcome

    def _keep(self, outcome: GroupOutcome) -> GroupOutcome:
        atomic.write_json(self.run_dir.group(self.group.name).result, codec.to_plain(outcome))
        return outcome

    def _look(self) -> bool:
        """Report the cluster's news; end what can't start; return whether the first Job is over."""
        views = view_jobs(DIALECT, self._job_ids)
        late, copy = (JobState.PENDING, JobState.HELD), self._copy
        self._waiting = {
            job_id: view
            for job_id, view in views.items()
            if view.state in late and view.reason is not None and job_id != self._job_ids[0]
        }
        for job_id in self._job_ids:
            view = views.get(job_id)
            # A queue holds all Jobs of a set for one reason.
            is_held = view is None or view.state is JobState.HELD
            if job_id == self._job_ids[0] or self._set_id is None or not is_held:
                self._tell(job_id, view)
            report = self._never.judge(view, DIALECT)
            if report is None and copy is not None and job_id == self._job_ids[0]:
                report = copy.starts.judge(view, has_begun=self._has_begun)
            if report is not None:
                note_group(self.run_dir, self.group.name, report)
        self._explain_losses()
        if copy is not None:
            with contextlib.suppress(MusterError):
                copy.release.look(*views.values(), is_known=copy.mirror.is_settled)
                copy.mirror.look()
        for objects in copy.objects if copy is not None else ():
            with contextlib.suppress(MusterError, OSError):
                objects.look()
        if not self._has_begun:
            self._wait_for_room(list(views.values()))
        first = views.get(self._job_ids[0])
        self._is_gone = first is None or first.state is JobState.CANCELLED
        return self._is_gone or (first is not None and first.state.is_final)

    def _wait_for_room(self, views: Sequence[JobView]) -> None:
        """Let the first pod wait while the cluster lacks room, up to the `queue_timeout`."""
        short = [view for view in views if lacks_room(view)]
        now, limit_s = time.monotonic(), self.group.queue_timeout_s
        self._short_since = (self._short_since or now) if short else None
        if not short:
            return
        if self._copy is not None:
            with contextlib.suppress(MusterError):
                if reason := self._copy.starts.no_room(short[0]):
                    self._copy.mirror.note_no_room(reason)
        if limit_s is not None and now - (self._short_since or now) > limit_s:
            self._keep(self._never_had_room(short[0], limit_s))

    def _never_had_room(self, view: JobView, limit_s: float) -> GroupOutcome:
        error = MusterError(
            f"it waited longer than its queue_timeout of {limit_s:g} s",
            where=f"job {view.job_id}",
            why=f"kubernetes says: {view.reason}",
            fix=(view.wait.hint if view.wait is not None else None)
            or "a longer queue_timeout, or ask for less",
        )
        return replace(self._failed(error), state=State.FAILED_QUEUE_TIMEOUT)

    def _explain_losses(self) -> None:
        """Report why a task has lost its pod, once the cluster knows: its agent is only gone."""
        for task, (until, begun) in list(self._lost.items()):
            said = ""
            with contextlib.suppress(MusterError):
                if self._run is not None:
                    said = explain_task_loss(self._run, task, begun)
            if said:
                text = f"task {task}: {said}"
                self.hear(messages.Event(name="notice", time="", fields={"text": text}))
            if said or time.monotonic() > until:
                del self._lost[task]

    @property
    def _has_begun(self) -> bool:
        return os.path.exists(self.run_dir.group(self.group.name).events)

    def _tell(self, job_id: str, view: JobView | None) -> None:
        if view is None or view.state is JobState.RUNNING or view.state.is_final:
            return
        text = describe_job(view)
        if self._reported.get(job_id) != text:
            self._reported[job_id] = text
            fields = {"group": self.group.name, "text": text}
            self.hear(messages.Event(name="group_waits", time="", fields=fields))

    def _pass_on(self) -> None:
        """Pass on what has come of the record since the last call."""
        for one in self._follow.events():
            self._note_loss(one)
            fields = fields_of(one.event)
            self.hear(messages.Event(name=one.event.name, time=one.time, fields=fields))
        for task, text in self._follow.texts(self._logs()):
            self.hear(task_messages.TaskOutput(task=task, stream=1, text=text, dropped_lines=0))

    def _note_loss(self, one: Stamped) -> None:
        match one.event:
            case TaskStartedEvent(task=task):
                self._started[task] = one.at
            case AgentLostEvent(task=task):
                self._lost[task] = time.monotonic() + LOSS_KNOWN_S, self._started.get(task)

    def _logs(self) -> Iterator[tuple[str, str]]:
        for task in self.group.tasks:
            first = self.run_dir.task_log(self.group.name, task.name, 0)
            folder = os.path.dirname(os.path.dirname(first))
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            # After a replacement of the first pod on an empty disk, attempts do not begin with 0.
            numbers = (name.removeprefix("attempt-") for name in names)
            for attempt in sorted(int(number) for number in numbers if number.isdecimal()):
                yield task.name, self.run_dir.task_log(self.group.name, task.name, attempt)

    def _end_without_record(self) -> None:
        """Save the outcome from the first pod's last message, or a failure without a record."""
        outcome = None
        with contextlib.suppress(MusterError, ValueError, codec.CodecError, TypeError):
            pod = find_pod(self._job_ids[0], 0)
            said = json.loads(pod.end.last_message) if pod is not None and pod.end else {}
            if "group" in said:
                outcome = codec.from_plain(GroupOutcome, said["group"])
                if self._run is not None and pod is not None:
                    outcome = self._without_record(outcome, self._run, pod)
            elif "error" in said:
                error = MusterError(
                    str(said["error"]), why=said.get("because"), fix=said.get("hint")
                )
                outcome = self._failed(error)
        if outcome is None:
            what = f"the Job of group {self.group.name} ended and left no record"
            why: str | None = None
            fix = f"kubectl describe job {self._job_ids[0].rpartition('/')[2]}"
            if self._is_gone:
                what = f"the cluster does not have the Job of group {self.group.name} any more"
                why = f"it was deleted, or its namespace; what had come by then is in {self.run_dir.path}"
                fix = f"muster restart {short_id(self.plan.run_id)}"
            error = MusterError(what, where=f"job {self._job_ids[0]}", why=why, fix=fix)
            outcome = self._failed(error)
        self._keep(outcome)

    def _without_record(self, outcome: GroupOutcome, run: RunInPods, pod: Pod) -> GroupOutcome:
        """Return the outcome in a group's last message; no success, as outputs are missing."""
        with_reason = explain_group_loss(outcome, run)
        if with_reason.state is State.FAILED_START_ERROR:
            return with_reason  # there is no record
        self._lacks_record = True
        lacks_right = self._copy.mirror.lacks_right if self._copy is not None else None
        missing = explain_missing(with_reason.state, run, pod, lacks_right)
        if with_reason.state is State.COMPLETED:
            state, code = State.FAILED_BACKEND_ERROR, MissingRecordError.exit_code
            return replace(with_reason, state=state, exit_code=code, report=missing)
        report = with_reason.report or missing
        because = (*report.because, missing.error, *missing.because)
        return replace(with_reason, report=replace(report, because=because))

    def _failed(self, error: MusterError) -> GroupOutcome:
        state = State.FAILED_CANCELED if self._num_stops else State.FAILED_BACKEND_ERROR
        return GroupOutcome(
            group=self.group.name,
            state=state,
            exit_code=error.exit_code,
            elapsed_s=0.0,
            report=report_of_error(error),
        )

    # Ending the group.

    def send_stop(self) -> None:
        """Ask the head to stop its group; end a group that has not begun at once."""
        self._num_stops += 1
        asyncio.get_running_loop().run_in_executor(None, self._stop)

    def _stop(self) -> None:
        why = "it had not begun"
        if self._run is not None and self._has_begun:
            try:
                ask_owner_to_end(self._run)
            except (MusterError, OSError) as error:
                why = str(error)
            else:
                return
        if not os.path.exists(self.run_dir.group(self.group.name).result):
            self._keep(self._failed(MusterError("the group was stopped", why=why)))

    def kill(self) -> None:
        """Fail the group at once; its follower then removes the Jobs."""
        self._keep(self._failed(MusterError("the group was killed")))

    def close(self) -> None:
        """Stop following the group."""
        if self._copy is not None:
            self._copy.watch.stop()
            self._copy.mirror.stop()

    def _remove(self) -> None:
        self.close()
        if self._lacks_record:
            return
        for job_id in self._job_ids if self._set_id is None else self._job_ids[:1]:
            try:
                remove_jobs([job_id], self._set_id)
            except MusterError as error:
                stays = self._set_id or job_id
                self.say(f"{stays} stays on the cluster: {error.what} ({error.fix or error.why})")


@dataclass(frozen=True, slots=True)
class PodPlaces:
    """The cluster on which a workflow's groups run."""

    run_dir: RunDir
    site: "Site"
    say: Callable[[str], None]

    def conductor(
        self, plan: WorkflowPlan, group: GroupPlan, hear: Callable[[messages.Message], None]
    ) -> PodGroup:
        """Return the conductor of a group there."""
        return PodGroup(plan, group, self.run_dir, self.site, hear, self.say)


def cluster_of(run_dir: RunDir, voice: TerminalVoice) -> PodPlaces | None:
    """Return the cluster on which a workflow's groups run; None for groups on this machine."""
    from torchmuster.launcher.engines.registry import schedulers
    from torchmuster.launcher.spec.site import load_sites

    noted = atomic.read_json(run_dir.site)
    if not isinstance(noted, dict):
        return None
    site = load_sites(os.getcwd(), os.environ, schedulers()).sites[str(noted["site"])]
    keys = tuple((str(name), str(text)) for name, text in noted["keys"].items())
    return PodPlaces(run_dir, site.model_copy(update={"own_keys": keys}), voice.say)
