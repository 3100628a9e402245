"""The owner of a workflow group in its first pod: the head, and the task agents in all pods.

    conduct-group-pods --key FILE --order FILE

The client creates a group's Jobs when the groups before it have ended, and copies what this process
writes; meanwhile the group needs no client. The exit code is the pod's: 0, 113 for a final failure,
75 when this pod is taken away.
"""

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.codec import to_arguments
from torchmuster.core.model.text import render_report, report_of_error
from torchmuster.core.net.address import read_secret
from torchmuster.errors import MusterError
from torchmuster.kubernetes.firstpod.conduct import (
    MOST_MESSAGE_BYTES,
    OwnerInPod,
    conduct,
    end_pods,
    leave_message,
    wait_for_archive,
)
from torchmuster.kubernetes.firstpod.others import PodWait, RecordReplicas
from torchmuster.kubernetes.node.call import PodConnections, connections_of
from torchmuster.kubernetes.node.order import FINAL_CODE, PodOrder
from torchmuster.kubernetes.node.record import place, scope_of, take_outputs
from torchmuster.kubernetes.node.serve import bind_in_pod
from torchmuster.kubernetes.node.task import PodTaskWords
from torchmuster.kubernetes.pods.pull import BROKEN, Pull, into, program
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.replica import Copy
from torchmuster.launcher.node.remote.files import ReturnedOutputs
from torchmuster.workflow.head.group_head import ProcessStarter, conduct_group, read_plan
from torchmuster.workflow.owner.workflow import link_reused_outputs
from torchmuster.workflow.plan import GroupInput, GroupNodes
from torchmuster.workflow.record import GroupOutcome, State, next_task_attempts, read_outcome
from torchmuster.workflow.task.setup import TaskOrder

# Gathering the files of tasks in other pods: logs while they grow, outputs at the end.


_AGAIN_S = 2.0
_FINISH_S = 120.0


@dataclass(slots=True)
class GroupGather:
    """Copies the records of a group's other pods to the first one, unless they share a volume.

    Attributes:
        pods: The indices of the pods in which a task's agent is started.
    """

    order: PodOrder
    key: str
    pods: Sequence[int]
    say: Callable[[str], None]
    _threads: list[threading.Thread] = field(default_factory=list)
    _pulls: dict[int, Pull] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start copying, in one thread for each pod."""
        if self.order.has_volume:
            return
        lines = connections_of(self.order, self.key)
        for index in self.pods:
            thread = threading.Thread(target=self._follow, args=(index, lines), daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self) -> None:
        """Copy what is missing, with the outputs; name the pods that don't answer."""
        self._stopping.set()
        for pull in list(self._pulls.values()):
            pull.stop()
        for thread in self._threads:
            thread.join(_FINISH_S)

    def _follow(self, index: int, lines: PodConnections) -> None:
        name, run_dir = self.order.host(index), self.order.run_dir
        copy = Copy(run_dir.path, scope_of(self.order))
        while not self._stopping.is_set():
            with contextlib.suppress(*BROKEN):
                self._pull(index, lines, "pod-record", copy)
            self._stopping.wait(_AGAIN_S)
        try:
            outputs = ReturnedOutputs(run_dir)
            end = self._pull(index, lines, "pod-record --once --outputs", copy, outputs)
            if end is None:
                raise MusterError("the connection ended")
            came = os.path.join(self.order.folder, f"came-{index}")
            outputs.unpack(name, came)
            take_outputs(run_dir, came)
        except (*BROKEN, ValueError) as error:
            self.say(f"{name}: what its tasks made did not come: {error}")
            return
        if end.num_stay:
            self.say(f"{name}: too large to leave its pod: {', '.join(end.stay)}")
        if end.unread:
            self.say(f"{name}: can't be read in its pod: {', '.join(end.unread)}")

    def _pull(
        self,
        index: int,
        lines: PodConnections,
        words: str,
        copy: Copy,
        outputs: ReturnedOutputs | None = None,
    ) -> messages.CopyEnd | None:
        name, take = self.order.host(index), into(copy)

        def hear(message: messages.RemoteMessage) -> bool:
            if isinstance(message, messages.FilePiece) and message.path == messages.OUTPUT_FILE:
                if outputs is not None:
                    outputs.take(message, name)
                return True
            return take(message)

        self._pulls[index] = Pull([self.order.address(index), program(words)], lines.start)
        return self._pulls[index].run(copy.has(), hear)


def main(arguments: list[str]) -> int:
    """Own the group of these pods to its end; return the pod's exit code."""
    proc.become_subreaper()
    return conduct(arguments, _GroupOwner)


class _GroupOwner(OwnerInPod[GroupOutcome]):
    errors = (MusterError, OSError, ValueError)  # ValueError: a plan that can't be read

    @property
    def group(self) -> str:
        return self.order.group or ""

    def read(self) -> GroupOutcome | None:
        return read_outcome(self.run_dir, self.group)

    def failed(self, error: MusterError) -> GroupOutcome:
        return GroupOutcome(
            group=self.group,
            state=State.FAILED_START_ERROR,
            exit_code=error.exit_code,
            elapsed_s=0.0,
            report=report_of_error(error),
        )

    def stopped(self) -> GroupOutcome:
        outcome = self.failed(MusterError("the group was stopped before it began"))
        return replace(outcome, state=State.FAILED_CANCELED)

    def is_whole(self, ended: GroupOutcome) -> bool:
        return ended.state not in (State.FAILED_CANCELED, State.FAILED_START_ERROR)

    def set_aside(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.run_dir.group(self.group).result)

    def code_of(self, ended: GroupOutcome) -> int:
        return 0 if ended.state is State.COMPLETED else FINAL_CODE

    def own(self) -> GroupOutcome:
        order = self.order
        os.makedirs(order.run_dir.path, mode=0o700, exist_ok=True)
        os.makedirs(order.folder, exist_ok=True)
        neighbours = RecordReplicas(order, connections_of(order, self.key).start, self.voice.say)
        if not os.path.exists(order.stamps):  # nothing has been placed yet
            neighbours.find()
            wait_for_archive(order, self.brought, order.join_s, self.voice.say)
            # The archive is kept: the other pods get it from here.
            place(order, self.brought)
        if order.has_volume:
            link_reused_outputs(read_plan(self.run_dir), self.run_dir)
        pod_wait = PodWait(
            order=order,
            secret=read_secret(self.key),
            least=order.num_pods,
            most=order.num_pods,
            last_call_s=0.0,
            say=self.voice.say,
        )
        asyncio.run(pod_wait.wait(order.join_s))
        # Continue the attempt numbers of the record on a volume.
        folder = self.run_dir.group(self.group)
        following = GroupInput(first_attempts=next_task_attempts(folder.events))
        atomic.write_json(folder.start, codec.to_plain(following))
        first = {order.hosts.index(on[0].name) for on in self._nodes().tasks.values()}
        gather = GroupGather(order, self.key, sorted(first - {0}), self.voice.say)
        gather.start()
        neighbours.start()
        try:
            asyncio.run(self._conduct())
        finally:
            neighbours.stop()
            gather.finish()
        outcome = read_outcome(self.run_dir, self.group)
        if outcome is None:
            raise MusterError("the head of the group left no result", where=order.folder)
        if outcome.state is State.FAILED_CANCELED:  # the head handles the signals itself
            self._note_stop(signal.SIGTERM)
        return outcome

    async def _conduct(self) -> int:
        order = self.order
        plan = read_plan(self.run_dir)
        nodes = self._nodes()
        listening = bind_in_pod(order.head_port)
        port = int(listening.getsockname()[1])
        here = [os.environ.get("MUSTER_POD_IP", ""), order.address(0), "127.0.0.1"]
        heads = [(address, port) for address in here if address]

        def wrap(task: TaskOrder) -> list[str] | None:
            index = order.hosts.index(nodes.tasks[task.task][0].name)
            if index == 0:
                return None
            command = ("task", *to_arguments(task))
            words = PodTaskWords(key=self.key, order=self.order_path, index=index, command=command)
            return proc.node_program("pod-task", *to_arguments(words))

        starter = ProcessStarter(self.run_dir, self.group, heads, wrap=wrap)
        return await conduct_group(
            plan,
            self.run_dir,
            self.group,
            listening,
            starter,
            obeys_signals=True,
            stopped_by=lambda: "you" if self.is_cancelled else "the end of its pod",
        )

    def _nodes(self) -> GroupNodes:
        return codec.from_plain(GroupNodes, atomic.read_json(self.run_dir.group(self.group).nodes))

    def end(self, ended: GroupOutcome) -> int:
        """Record and report how the group ended; end the pods of its other Jobs."""
        outcome = ended
        os.makedirs(self.order.folder, exist_ok=True)
        atomic.write_json(self.run_dir.group(self.group).result, codec.to_plain(outcome))
        if outcome.report is not None and outcome.state.is_failed:
            self.voice.print(render_report(outcome.report))
        leave_message(last_words(outcome))
        order, code = self.order, self.code_of(outcome)
        atomic.write_json(order.ended, {"code": code})
        # Pods of other Jobs don't end with the first Job; those of one JobSet, with a common
        # Service, end with it. If this pod waits for a client, it ends all the other pods.
        own_service = order.address(0).partition(".")[2]
        others = [host for host in order.hosts if host.partition(".")[2] != own_service]
        end_pods(order, self.key, list(order.hosts[1:]) if order.keep_s else others)
        return code


def last_words(outcome: GroupOutcome) -> str:
    """Return an outcome as JSON for a pod's termination message."""
    plain = {"group": codec.to_plain(outcome)}
    text = json.dumps(plain)
    if len(text) <= MOST_MESSAGE_BYTES:
        return text
    return json.dumps({"group": codec.to_plain(replace(outcome, tasks=(), report=None))})
