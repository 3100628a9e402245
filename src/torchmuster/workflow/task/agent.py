"""The program `task`, the agent of one task: it fetches inputs, runs the command when the head says so, and uploads.

Its command line is a `TaskOrder`. It does one thing at a time (`_activity`) and listens to the head meanwhile. Its command never
outlives it, and it never outlives the head for long: when the connection is lost, it kills what it
started.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

import torchmuster
from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir, WorkingFolder
from torchmuster.core.model import codec
from torchmuster.core.net import ipc, messages
from torchmuster.core.net.address import read_secret, split_endpoint
from torchmuster.core.net.channel import Channel
from torchmuster.core.node.head_link import HeadLink
from torchmuster.core.node.kernel import explain_kill, read_counters
from torchmuster.core.node.options import HeadPlace, take_environment
from torchmuster.core.node.output import LogVoice, RankOutput, Voice
from torchmuster.core.node.setup import make_socket_folder
from torchmuster.errors import MusterError, found_bug
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node.exec import Execs
from torchmuster.launcher.node.shell import NodeShell, SetupError
from torchmuster.workflow.head import task_messages
from torchmuster.workflow.head.group_head import (
    end_with_lifeline,
    port_candidates,
    read_plan,
    read_start,
)
from torchmuster.workflow.plan import NetworkShare, TaskNetwork
from torchmuster.workflow.record import State
from torchmuster.workflow.sandbox.container import CommandFailedError
from torchmuster.workflow.task.command import TaskCommand
from torchmuster.workflow.task.data import UploadResult, fetch_inputs, publish, upload_outputs
from torchmuster.workflow.task.setup import TaskFacts, TaskOptions, TaskOrder
from torchmuster.workflow.task.view import CommandView

CODE_DOWNLOAD = 2010
CODE_START = 3003
_LEASE_CHECK_S = 1.0
_JOIN_S = 60.0
_REAP_S = 0.01
_MAX_UNSENT_SHOW_BYTES = 1 << 20
# DNS learns names of other pods after they start, and caches failed lookups for a while.
_DNS_LIMIT_S = 60.0
_DNS_RETRY_S = 0.5
_DNS_NOTICE_AFTER_S = 3.0


class TaskAgent:
    """The agent of a task in one working directory: for an attempt, and its retries in place."""

    def __init__(self, options: TaskOptions, disk: DiskWriter, voice: Voice) -> None:
        self._options = options
        self._disk = disk
        self._voice = voice
        self._attempt = options.attempt
        folder = options.run_dir.task_folder(options.task.name)
        self._place = WorkingFolder(os.path.join(folder, f"place-{options.attempt}"))
        self._activity: asyncio.Task[None] | None = None
        self._command: TaskCommand | None = None
        self._stop_at: float | None = None  # when SIGKILL follows
        heads = HeadPlace(addresses=options.heads, secret=options.secret, join_timeout_s=_JOIN_S)
        self._link = HeadLink(heads, voice.say)
        self._why_gone = ""
        self._calls: dict[str, ipc.IpcCall[ipc.TaskRequest]] = {}
        self._num_calls = 0
        self._has_inputs = False
        self._is_set_up = False
        self._view: CommandView | None = None
        self._execs = Execs(options.task.name, self._send)

    async def run(self) -> int:
        """Serve the head until it releases us; return the exit code of the agent itself."""
        path = self._options.socket_path
        serving = ipc.IpcServer(path, self._command_pids, ipc.TaskRequest, self._answer_call)
        await serving.open()
        channel = await self._link.call()
        self._link.lease.begin()  # only now: the call may have taken long
        watching = asyncio.create_task(self._watch_lease())
        self._begin(self._prepare())
        try:
            why = await self._link.converse(channel, self._hello(channel), self._take)
            if why is None:
                return 0
            why = self._why_gone or f"the head of the group has gone ({why})"
            self._voice.say(f"{why}: the command is ended")
            return 7
        finally:
            watching.cancel()
            await self._end_everything()
            serving.close()
            await channel.close()

    # The head.

    def _hello(self, channel: Channel) -> task_messages.TaskHello:
        address = channel.own_address
        host = socket.gethostname()
        network = self._options.network
        if self._options.address is not None:  # other hosts may not know this host's own name
            address = host = self._options.address
        elif network is not None:
            address, host = network.address, network.name
        elif self._options.host_name is not None:
            host = self._options.host_name
            address = os.environ.get("MUSTER_POD_IP", address)
        elif address.startswith("127."):
            host = "localhost"
        return task_messages.TaskHello(
            task=self._options.task.name,
            attempt=self._attempt,
            version=torchmuster.__version__,
            pid=os.getpid(),
            host=host,
            address=address,
            boot_id=proc.boot_id(),
            network_id=proc.network_id(),
        )

    async def _watch_lease(self) -> None:
        """Abort the connection when the lease runs out: the head may have replaced this agent."""
        while True:
            await asyncio.sleep(_LEASE_CHECK_S)
            silent_s = self._link.silent_s()
            if silent_s is not None and self._link.channel is not None:
                self._why_gone = f"no word from the head of the group for {silent_s:.0f} s"
                self._link.channel.abort()

    def _send(self, message: messages.Message) -> None:
        self._link.send(message)

    async def _take(self, message: messages.Message) -> bool:
        """Carry out the head's order; return whether the agent stays."""
        match message:
            case task_messages.TaskLeave():
                return False
            case task_messages.TaskWelcome():
                self._link.welcome(message)
            case task_messages.TaskBegin():
                self._begin(self._run_command(message))
            case task_messages.TaskAgain(attempt=attempt):
                self._attempt = attempt
                self._stop_at = None
                self._begin(self._prepare())
            case task_messages.TaskStop(attempt=attempt, grace_s=grace_s):
                if attempt == self._attempt:
                    self._stop(grace_s)
            case task_messages.TaskUpload(succeeded=succeeded):
                self._begin(self._upload(succeeded=succeeded))
            case messages.Forward(signum=signum):
                if self._command is not None:
                    self._command.forward(signum)
            case task_messages.BarrierAnswer():
                await self._pass_answer(message)
            case _ if isinstance(message, part_messages.FromExecClient):
                self._execs.take(message, self._command if self._has_process() else None)
        return True

    def _begin(self, activity: Coroutine[Any, Any, None]) -> None:
        self._activity = asyncio.create_task(activity)
        self._activity.add_done_callback(self._report_bug)

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        """Report an activity that raised, so that the head does not wait for it."""
        if task.cancelled() or task.exception() is None:
            return
        error = found_bug("the agent", task.exception())
        self._voice.print(error.why or error.what)
        self._not_prepared(error, State.FAILED_SERVER_ERROR, CODE_START)

    # Before the command.

    async def _prepare(self) -> None:
        try:
            for folder in (self._place.output, self._place.work):
                os.makedirs(folder, exist_ok=True)
            is_training = self._options.task.training is not None  # its run does the setup
            if self._options.plan.setup and not self._is_set_up and not is_training:
                await self._set_up()
            if not self._has_inputs:  # a retry in place finds them here
                task, run_dir = self._options.task, self._options.run_dir
                resolve = self._outer_facts().resolve
                await fetch_inputs(task, self._place, run_dir, self._doing, resolve)
                self._has_inputs = True
        except SetupError as error:
            self._not_prepared(error, State.FAILED_START_ERROR, CODE_START)
            return
        except MusterError as error:
            self._not_prepared(error, State.FAILED, CODE_DOWNLOAD)
            return
        except OSError as error:
            what = "the working directory can't be made"
            wrapped = MusterError(what, where=error.filename, why=error.strerror)
            self._not_prepared(wrapped, State.FAILED_START_ERROR, CODE_START)
            return
        free = () if self._options.network else _free_ports(self._options.port_candidates)
        free = free or self._options.port_candidates[:8]
        self._send(task_messages.TaskPrepared(attempt=self._attempt, free_ports=free))

    async def _set_up(self) -> None:
        """Run the site's setup lines; this process and its children then have their variables."""
        plan, node = self._options.plan, socket.gethostname()
        log = self._options.run_dir.setup_log(node)
        shell = NodeShell(node, self._notice, lambda data: self._disk.append(log, data))
        self._disk.append(log, "".join(f"+ {line}\n" for line in plan.setup).encode())
        shelled = await shell.run_lines(plan.setup, dict(os.environ), {}, plan.setup_origin)
        os.environ.clear()
        os.environ.update(shelled.environment)
        self._is_set_up = True

    def _doing(self, text: str) -> None:
        self._voice.say(text)
        self._send(task_messages.TaskDoing(text=text))

    def _notice(self, text: str) -> None:
        self._voice.say(text)
        self._send(messages.Notice(text=text))

    def _not_prepared(self, error: MusterError, state: State, code: int) -> None:
        where = f" ({error.where})" if error.where else ""
        self._send(
            task_messages.TaskNotPrepared(
                attempt=self._attempt,
                state=state.value,
                why=f"{error.what}{where}"[:2000],
                code=code,
                detail=tuple((error.why or "").splitlines()[-40:]),
                hint=error.fix,
            )
        )

    # The command.

    async def _run_command(self, begin: task_messages.TaskBegin) -> None:
        if self._options.host_name is not None:
            await _wait_for_dns(begin.hosts.values(), self._doing)
        facts = replace(
            self._outer_facts(), hosts=begin.hosts, addresses=begin.addresses, ports=begin.ports
        )
        group, task = self._options.group.name, self._options.task.name
        log = self._options.run_dir.task_log(group, task, self._attempt)
        output = RankOutput(0, log, self._disk, self._show, frozenset((1, 2)), {})
        before = read_counters()
        started_at = time.monotonic()
        try:
            command = TaskCommand(facts, self._options, self._voice)
            self._command = command
            command.start(output, self._view, self._notice)
            self._view = command.view
        except MusterError as error:
            output.close()
            self._command = None
            self._not_prepared(error, State.FAILED_START_ERROR, CODE_START)
            return
        self._send(task_messages.TaskStarted(attempt=self._attempt, pid=command.pid))
        if self._stop_at is not None:  # the stop has overtaken the start
            command.terminate()
        try:
            status = await self._wait_for_end(command)
        finally:
            output.close()
        self._command = None
        self._stop_at = None
        try:
            code, signum = command.read_end(status)
        except CommandFailedError as error:
            command.leave()
            self._not_prepared(error, error.state, error.code)
            return
        await command.finish()
        evidence = explain_kill(before, command.pid) if signum == signal.SIGKILL else None
        self._send(
            task_messages.TaskEnded(
                attempt=self._attempt,
                code=code,
                signum=signum,
                elapsed_s=time.monotonic() - started_at,
                tail=output.tail(),
                memory_evidence=evidence,
            )
        )

    async def _wait_for_end(self, command: TaskCommand) -> int:
        """Wait until the command and all its processes have ended; SIGKILL after a stop's grace."""
        while (status := command.poll()) is None:
            self._kill_when_due(command)
            await asyncio.sleep(_REAP_S)
        self._execs.end_all("the command of the task has ended")
        while self._stop_at is not None and command.has_processes():  # they may still save data
            self._kill_when_due(command)
            await asyncio.sleep(_REAP_S)
        while not command.kill_leftovers():
            await asyncio.sleep(_REAP_S)
        return status

    def _kill_when_due(self, command: TaskCommand) -> None:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            command.kill()
            self._stop_at = time.monotonic() + 1.0

    def _stop(self, grace_s: float) -> None:
        first = self._stop_at is None
        kill_at = time.monotonic() + grace_s
        self._stop_at = kill_at if self._stop_at is None else min(self._stop_at, kill_at)
        if grace_s > 0 and first and self._command is not None:
            self._command.terminate()

    def _show(self, rank: int, stream: int, text: str, left_out: int) -> None:
        del rank
        channel, name = self._link.channel, self._options.task.name
        if channel is not None and channel.unsent_bytes <= _MAX_UNSENT_SHOW_BYTES:
            channel.send_nowait(
                task_messages.TaskOutput(
                    task=name, stream=stream, text=text, dropped_lines=left_out
                )
            )

    # After the command.

    async def _upload(self, *, succeeded: bool) -> None:
        error: str | None = None
        stored = UploadResult()
        try:
            stored = await upload_outputs(
                self._options.task,
                self._place,
                self._doing,
                succeeded=succeeded,
                run_id=self._options.plan.run_id,
                resolve=self._outer_facts().resolve,
            )
        except MusterError as failed:
            why = f": {failed.why}" if failed.why else ""
            error = f"{failed.what}{f' ({failed.where})' if failed.where else ''}{why}"
        try:
            publish(self._options.run_dir.task_output(self._options.task.name), self._place.output)
        except OSError as failed_link:
            error = error or f"the output can't be published: {failed_link.strerror}"
        self._send(
            task_messages.TaskUploaded(
                attempt=self._attempt,
                error=error,
                notes=tuple(stored.notes),
                versions=tuple(stored.versions),
            )
        )

    def _outer_facts(self) -> TaskFacts:
        """Return the facts for the tokens of URLs, which need no other task."""
        return TaskFacts(
            workflow=self._options.plan,
            group=self._options.group,
            task=self._options.task,
            attempt=self._attempt,
            place=self._place,
        )

    async def _end_everything(self) -> None:
        if self._activity is not None:
            self._activity.cancel()
            await asyncio.gather(self._activity, return_exceptions=True)
        if self._command is not None:
            self._command.kill()
        self._execs.end_all("the agent of the task has ended")
        deadline = time.monotonic() + 10.0
        while proc.end_children() and time.monotonic() < deadline:
            await asyncio.sleep(_REAP_S)
        if self._command is not None:
            self._command.leave()

    # Calls from the task's processes.

    def _command_pids(self) -> set[int]:
        if self._command is None:
            return set()
        return self._command.pids() | self._execs.pids

    def _has_process(self) -> bool:
        return self._command is not None and self._command.pid > 0 and self._command.poll() is None

    async def _answer_call(self, call: ipc.IpcCall[ipc.TaskRequest]) -> None:
        """Pass a process's call to the head; its answers carry the number of the call."""
        self._num_calls += 1
        caller_id = f"{self._options.task.name}/{os.getpid()}/{self._num_calls}"
        self._calls[caller_id] = call
        self._send(task_messages.BarrierCall(caller_id=caller_id, **vars(call.request)))
        try:
            await call.closed.wait()
        finally:
            self._calls.pop(caller_id, None)
            self._send(task_messages.BarrierLeave(caller_id=caller_id))

    async def _pass_answer(self, answer: task_messages.BarrierAnswer) -> None:
        call = self._calls.get(answer.caller_id)
        if call is not None:
            await call.reply(answer_of_barrier(answer))
            if answer.kind is not task_messages.BarrierState.WAITING:
                call.closed.set()


def answer_of_barrier(answer: task_messages.BarrierAnswer) -> ipc.AgentAnswer:
    """Convert the head's answer about a barrier into that for the waiting process."""
    match answer.kind:
        case task_messages.BarrierState.RELEASED:
            return ipc.BarrierReleased()
        case task_messages.BarrierState.WAITING:
            return ipc.BarrierWaits(what=answer.what, left_s=answer.left_s)
        case task_messages.BarrierState.FAILED:
            return ipc.CallFailed(
                what=answer.what,
                where=answer.where,
                why=answer.why,
                fix=answer.fix,
                timed_out=answer.timed_out,
            )


def _free_ports(candidates: tuple[int, ...]) -> tuple[int, ...]:
    """Return the candidates on which no process listens here."""
    free: list[int] = []
    for port in candidates:
        with contextlib.suppress(OSError), socket.socket() as trying:
            trying.bind(("", port))
            free.append(port)
    return tuple(free)


async def _wait_for_dns(names: Iterable[str], doing: Callable[[str], None]) -> None:
    """Wait at most a minute until all names resolve; a command reports one that it lacks."""
    loop = asyncio.get_running_loop()
    begun, has_said = loop.time(), False
    missing = set(names)
    while True:
        missing = {name for name in missing if not await _is_known(name)}
        waited_s = loop.time() - begun
        if not missing or waited_s > _DNS_LIMIT_S:
            return
        if waited_s > _DNS_NOTICE_AFTER_S and not has_said:
            has_said = True
            doing(f"waiting for DNS to know {', '.join(sorted(missing)[:4])}")
        await asyncio.sleep(_DNS_RETRY_S)


async def _is_known(name: str) -> bool:
    try:
        await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return True


_FLUSH_S = 5.0


def main(arguments: list[str]) -> int:
    """Run the agent of a task."""
    order = codec.from_arguments(TaskOrder, arguments)
    if order.environment is not None:
        take_environment(order.environment)
    proc.become_subreaper()
    return asyncio.run(_serve(order))


async def _serve(order: TaskOrder) -> int:
    run_dir = RunDir(order.run_dir)
    plan = read_plan(run_dir)
    group = plan.group(order.group)
    disk = DiskWriter(root=run_dir.path)
    disk.start()
    voice = LogVoice(run_dir.agent_log(order.task), disk)
    folder = make_socket_folder()
    _add_muster_to_path(folder)
    own_name = plugs.find("host_names", "pod")
    network = None
    if plan.network is TaskNetwork.PRIVATE:
        parts = atomic.read_json(run_dir.group(order.group).network)
        network = codec.from_plain(NetworkShare, parts[order.task])
    agent = TaskAgent(
        TaskOptions(
            plan=plan,
            group=group,
            task=group.task(order.task),
            attempt=order.attempt,
            run_dir=run_dir,
            heads=tuple(map(split_endpoint, order.head)),
            secret=read_secret(run_dir.secret),
            gpus=read_start(run_dir, order.group).gpus.get(order.task),
            network=network,
            port_candidates=port_candidates(plan, group),
            socket_path=os.path.join(folder, "task.sock"),
            address=order.address,
            host_name=own_name(os.environ) if own_name is not None else None,
        ),
        disk,
        voice,
    )
    running = asyncio.create_task(agent.run())
    end_with_lifeline(order.lifeline_fd, running)
    try:
        return await running
    except asyncio.CancelledError:
        return 7
    finally:
        disk.flush(_FLUSH_S)


def _add_muster_to_path(folder: str) -> None:
    """Append a `muster` with the command `barrier` to PATH, after one of the task's environment."""
    words = shlex.join(proc.node_program("task-muster"))
    script = f'#!/bin/sh\nexec {words} "$@"\n'.encode()
    atomic.replace_file(os.path.join(folder, "muster"), script, mode=0o755)
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), folder))
