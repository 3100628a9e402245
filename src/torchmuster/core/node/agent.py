"""The agent of one node: keeps a spawner, obeys the head, and never lets workers outlive it.

When its lease ends (`head_link`), it kills the workers: a node that the head can't hear must not
train alongside its successors.
"""

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torchmuster
from torchmuster.core import plugs, proc
from torchmuster.core.files.disk import DiskWriter, remove_old, too_old
from torchmuster.core.model import contract
from torchmuster.core.model import progress as heartbeat
from torchmuster.core.model.failure import OVERUSED, LeftProcess
from torchmuster.core.model.lease import PING_EVERY_S
from torchmuster.core.net import ipc, messages
from torchmuster.core.net.address import interface_of
from torchmuster.core.node.head_link import AgentRefusedError, HeadLink
from torchmuster.core.node.kernel import visible_gpus
from torchmuster.core.node.options import AgentOptions
from torchmuster.core.node.output import Showing, Voice
from torchmuster.core.node.setup import NodeWork, refusal_of
from torchmuster.core.node.spawner import messages as orders
from torchmuster.core.node.spawner.keeper import REAP_EVERY_S, SpawnerKeeper
from torchmuster.core.node.workers import (
    HeldMemory,
    NodeAttempt,
    WorkerSettings,
    network_variables,
    root_cause,
)
from torchmuster.core.proc import HasStatus
from torchmuster.errors import MusterError, found_bug

# The attempts of a node: start each one when the node is ready for it, follow its processes, report
# its end.


_LOOK_EVERY_S = 0.25


class AttemptKeeper:
    """The successive attempts of one agent.

    Args:
        spawners: Starts the workers.
        showing: Shows the workers' output.
        disk: Writes their logs.
        user: The agent.
        take_store: Returns the listening socket of an attempt's store; only on the head's node.

    Attributes:
        last: The newest attempt that started here.
    """

    def __init__(
        self,
        spawners: SpawnerKeeper,
        showing: Showing,
        disk: DiskWriter,
        user: "Agent",
        take_store: Callable[[int], Any] | None = None,
    ) -> None:
        self.last: NodeAttempt | None = None
        self._order: messages.StartAttempt | None = None  # waits until the node is ready
        self._settling: int | None = None  # the attempt of which only output is left
        self._spawners, self._showing = spawners, showing
        self._disk, self._user = disk, user
        self._take_store = take_store

    def living(self) -> NodeAttempt | None:
        """Return the attempt that may still have processes on this node."""
        attempt = self.last
        return attempt if attempt is not None and not attempt.reaped else None

    # The start.

    def take_order(self, order: messages.StartAttempt) -> None:
        """Start an attempt now, or as soon as the node is ready for it."""
        self._order = order
        self.start_if_ready()

    def start_if_ready(self) -> None:
        """Start the waiting attempt if spawner and setup are ready and the last attempt is gone."""
        order, spawner = self._order, self._spawners.link
        if order is None or spawner is None or self._spawners.ready is None:
            return
        settings = self._user.settings_of(order) if self.living() is None else None
        if settings is None:
            return
        self._order = None
        attempt = NodeAttempt(
            order, settings, spawner, lambda end: self._user.send(messages.WorkerEnded(end=end))
        )
        self.last = attempt
        self._showing.prefix_lines(order.ranks, self._spawners.environment)
        self._start_store(order)
        show = partial(self._showing.show, order.attempt)
        attempt.start(self._disk, show, self._showing.is_congested)
        for problem in attempt.problems:
            self._user.tell(problem)
        if (old := too_old(order.attempt, order.world_size)) is not None:
            first = order.ranks.first_rank
            ranks = range(first, first + order.ranks.num_workers)
            self._user.spawn(asyncio.to_thread(remove_old, settings.run_dir, old, ranks))

    def _start_store(self, order: messages.StartAttempt) -> None:
        store = self._take_store(order.attempt) if self._take_store is not None else None
        if store is None:
            return
        if self._spawners.has_torch:
            start = orders.StartStore(host=order.master_addr, port=order.master_port)
            self._spawners.order(start, os.dup(store.fileno()))
        store.close()

    # Its processes.

    def take_child(self, event: orders.ChildStarted | orders.ChildEnded) -> None:
        """Handle the start or the end of a worker or of the store."""
        attempt = self.last
        if attempt is None:
            return
        match event:
            case orders.ChildStarted(kind="worker"):
                attempt.note_started(event.rank, event.pid)
                if attempt.all_started:
                    self._user.send(
                        messages.WorkersStarted(
                            attempt=attempt.attempt,
                            pids=attempt.pids,
                            spawner_pid=self._spawners.pid,
                        )
                    )
            case orders.ChildEnded(kind="worker"):
                attempt.note_exit(event.rank, event.status)
            case orders.ChildEnded() if not attempt.killed:
                detail = contract.describe_exit(os.waitstatus_to_exitcode(event.status))
                self._user.send(messages.StoreLost(attempt=attempt.attempt, detail=detail))

    # The end.

    def take_kill(self, order: messages.KillAttempt) -> None:
        """Kill the workers of an attempt; report at once that an attempt not here has none left."""
        self._order = None
        living = self.living()
        if order.attempt == self._settling:
            return  # `finish` will report it in a moment
        if living is None or living.attempt != order.attempt:
            self._user.send(messages.AllReaped(attempt=order.attempt))
        elif order.grace_s and not living.asked:
            self._user.spawn(self._let_save(living, order.grace_s))
        else:
            self.kill(ended_well=order.ended_well)

    async def _let_save(self, attempt: NodeAttempt, grace_s: float) -> None:
        """End this node's survivors of a failure.

        Only a rank whose script handles SIGTERM gets that signal, and only while its stack is
        outside of collectives. A rank that waits in a collective runs no handler until its peers
        answer, and one of them is gone. So each rank is checked repeatedly, and killed once it
        enters a collective; one whose state is unknown counts as working. A rank of
        `torchmuster.train` saves what it needs in time, so it is killed at once.

        Args:
            attempt: The attempt of these ranks.
            grace_s: The time from SIGTERM to the end.
        """
        attempt.asked = True
        saving = [(rank, pid) for rank, pid in attempt.running if _can_save(attempt, rank, pid)]
        for rank, pid in attempt.running:
            if (rank, pid) not in saving:
                proc.kill_quietly(pid)
        deadline, reported = time.monotonic() + grace_s, set[int]()
        while saving and time.monotonic() < deadline:
            waiting = await asyncio.to_thread(self._user.waiting, attempt.attempt, saving)
            for rank, pid in saving:
                if rank in waiting:
                    proc.kill_quietly(pid)
                elif rank not in reported:
                    reported.add(rank)
                    proc.kill_quietly(pid, signal.SIGTERM)
            await asyncio.sleep(_LOOK_EVERY_S)
            saving = [one for one in attempt.running if one in saving]
        if self.living() is attempt:
            self.kill()

    def kill(self, *, ended_well: bool = False) -> None:
        """Kill all running workers, and drop a waiting order.

        The order comes from a head that is gone, or that now withdraws it.
        """
        self._order = None
        attempt = self.living()
        if attempt is not None:
            attempt.killed = True
            self._spawners.kill_children(lambda: attempt.reaped, ended_well=ended_well)

    async def lose(self, why: str, *, was_killed: bool) -> None:
        """Report that all workers have died with their spawner.

        If the spawner was killed, memory may be the reason.
        """
        if (living := self.living()) is not None:
            evidence = await living.memory_evidence() if was_killed else None
            living.note_lost(why, evidence)
            await self.finish()

    async def finish(self, left: tuple[LeftProcess, ...] = ()) -> None:
        """Finish the attempt, whose processes are gone but for `left`; start a waiting one."""
        attempt = self.living()
        if attempt is None:
            return
        await attempt.finish()
        self._settling = attempt.attempt
        await self._showing.settle()
        self._settling = None
        self._user.send(messages.AllReaped(attempt=attempt.attempt, left=left))
        self.start_if_ready()


def _can_save(attempt: NodeAttempt, rank: int, pid: int) -> bool:
    has_library = os.path.exists(heartbeat.heartbeat_path(attempt.folder, attempt.attempt, rank))
    return not has_library and proc.catches_signal(pid, signal.SIGTERM)


_UNKNOWN_S = 1.0  # a worker may call before its spawner has reported its start
_MAX_UNSAID = 64


class Agent:
    """One agent process; on the head, `take_store` returns the listening socket of a store."""

    def __init__(
        self,
        options: AgentOptions,
        spawner: tuple[HasStatus, Any] | None,
        socket_path: str,
        disk: DiskWriter,
        voice: Voice,
        work: NodeWork | None = None,
        take_store: Callable[[int], Any] | None = None,
    ) -> None:
        self.options = options
        self.disk = disk
        self.voice = voice
        self._first_spawner = spawner
        self._work = work
        self._unsaid: list[str] = []
        self._socket_path = socket_path
        self._incarnation = secrets.token_hex(8)
        self.welcome: messages.Welcome | None = None
        self.link = self.make_link()
        self.spawners = SpawnerKeeper(
            options.plan.program,
            options.environment,
            socket_path,
            self.link.clock,
            self,
            waits=options.is_alone,
        )
        self._goodbye: messages.Goodbye | None = None
        self._showing = Showing(options, self.link, voice)
        self._terminal = options.terminal
        self.attempts = AttemptKeeper(self.spawners, self._showing, disk, self, take_store)
        self.folder = os.path.dirname(socket_path)
        self.parts: list[AgentPart] = [make(self) for make in plugs.every("agent_parts")]
        self._memory = HeldMemory()
        self._ended = asyncio.Event()
        self._failure: MusterError | None = None
        self._is_taken_away = False
        self._tasks: set[asyncio.Task[None]] = set()

    def make_link(self) -> HeadLink:
        """Return the agent's link to its head, not connected yet."""
        return HeadLink(self.options.head, self.voice.say)

    # Its life.

    async def run(self) -> int:
        """Serve until the run is over; return the exit code.

        Raises:
            MusterError: The run is over for this agent: it was refused, or its head is gone.
        """
        proc.become_subreaper()
        loop = asyncio.get_running_loop()

        def lose(lines: int, why: str) -> None:
            loop.call_soon_threadsafe(self._showing.lose, lines, why)

        self.disk.on_loss = lose
        worker_socket = ipc.IpcServer(
            self._socket_path,
            lambda: self.attempts.last.running_pids if self.attempts.last is not None else set(),
            ipc.WorkerReport,
            self._take_report,
            unknown_s=_UNKNOWN_S,
            on_odd=lambda why: self.tell(
                f"a worker told its agent what it does not understand ({why}): another torchmuster?"
            ),
        )
        await worker_socket.open()
        passed_on = (signal.SIGUSR1, signal.SIGUSR2, contract.OVERUSED_SIGNAL)
        for signum in (*self.options.signals, *passed_on):
            loop.add_signal_handler(signum, self._take_signal, signum)
        if self._first_spawner is not None:
            self.spawners.adopt(*self._first_spawner)
        if self._work is not None and not self._work.is_done:
            self.spawn(self._set_up(self._work))
        if self.options.local_show and self._terminal is not None:
            screen = min(self._terminal.streams)
            loop.add_signal_handler(
                signal.SIGWINCH, lambda: self._resize(*os.get_terminal_size(screen))
            )
        if self.options.stdin_fd is not None:
            loop.add_reader(self.options.stdin_fd, self._read_stdin, self.options.stdin_fd)
        connection = loop.create_task(self._stay_connected())
        lease = loop.create_task(self._watch_lease())
        for part in self.parts:
            self.spawn(part.serve())
        end = loop.create_task(self._ended.wait())
        tasks: set[asyncio.Task[Any]] = {connection, lease, end}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in (connection, lease):
                if task.done() and not task.cancelled() and task.exception() is not None:
                    self._failure = self._failure or _as_muster_error(task.exception())
        finally:
            for running in (*tasks, *self._tasks):
                running.cancel()
            await self._end_all_processes()
            worker_socket.close()
            for part in self.parts:
                part.close()
            if self.link.channel is not None:
                await self.link.channel.close()
        if self._failure is not None:
            raise self._failure
        return self._goodbye.exit_code if self._goodbye is not None else 1

    @property
    def error_text(self) -> str | None:
        """Return the last attempt's first failure on this node, as torchrun writes it."""
        attempt = self.attempts.last
        return root_cause(attempt.ends, attempt.error_texts) if attempt is not None else None

    def fail(self, error: MusterError) -> None:
        """End the agent with this error."""
        self._failure = self._failure or error
        self._ended.set()

    def leave(self, code: int) -> None:
        """End the agent with this exit code, unless the head has said goodbye before."""
        self._goodbye = self._goodbye or messages.Goodbye(exit_code=code)
        self._ended.set()

    async def _end_all_processes(self) -> None:
        """End the spawner, then kill descendants until none is left."""
        await self.spawners.end()
        while proc.end_children():
            await asyncio.sleep(REAP_EVERY_S)
        if (living := self.attempts.living()) is not None:
            await living.finish()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something concurrently, until the agent ends."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail(_as_muster_error(task.exception()))

    # The head.

    async def _stay_connected(self) -> None:
        while True:
            channel = await self.link.call()
            why = await self.link.converse(channel, self._hello(), self._obey)
            if self._is_taken_away:  # an attempt that it joined now would soon be lost
                self.fail(MusterError(OVERUSED))
                return
            if self._goodbye is None and self.welcome is not None:
                self.voice.say(f"the connection to the head ended: {why}; connecting again")

    def _hello(self) -> messages.Hello:
        living = self.attempts.living()
        return messages.Hello(
            incarnation=self._incarnation,
            version=torchmuster.__version__,
            host=self.options.host,
            pid=os.getpid(),
            boot_id=proc.boot_id(),
            num_workers=self.options.num_workers,
            place=self.options.place,
            spawner_pid=self.spawners.pid,
            attempt=living.attempt if living is not None else None,
            wants_place_0=self.options.is_head,
            network_id=proc.network_id(),
            jobs=self.options.jobs,
            machine=os.environ.get(contract.MACHINE_VARIABLE, ""),
            holds_memory=self._memory.is_used,
            role=self.options.plan.role,
        )

    def become_head(
        self, address: tuple[str, int], announced: tuple[tuple[str, int], ...], term: int
    ) -> None:
        """Switch to the run's new head, in this process; `announced` is where others find it."""
        self.options = replace(self.options, is_head=True)
        self.link.turn_to((address,), announced, term)

    @property
    def is_idle(self) -> bool:
        """Return whether no attempt has processes left on this node."""
        return self.attempts.living() is None

    async def _watch_lease(self) -> None:
        """Keep the spawner's lease alive; kill the workers when our own lease has ended."""
        while True:
            await asyncio.sleep(PING_EVERY_S / 2)
            self.spawners.look()
            self.link.look_for_successor()
            silent_s = self.link.silent_s()
            if silent_s is not None:
                self._end_lease(silent_s)

    def _end_lease(self, silent_s: float) -> None:
        attempt = self.attempts.living()
        if attempt is not None and not attempt.killed:
            self.voice.say(
                f"no message from the head for {silent_s:.0f} s: this node's workers are killed"
            )
            attempt.note_lost("its agent had no message from the head and ended its workers")
            self.attempts.kill()
        self.link.end_silent()

    def send(self, message: messages.Message) -> None:
        """Send to the head, if it is connected."""
        self.link.send(message)

    # The head's orders.

    async def _obey(self, message: messages.Message) -> bool:
        """Carry out the head's order; a goodbye ends the agent and so the conversation."""
        match message:
            case messages.Welcome():
                self._take_welcome(message)
            case messages.Refused(sentence=sentence):
                self.fail(AgentRefusedError(sentence))
            case messages.StartAttempt():
                self.attempts.take_order(message)
            case messages.KillAttempt():
                self.attempts.take_kill(message)
            case messages.SignalWorkers(signum=signum, if_caught=if_caught):
                if (living := self.attempts.living()) is not None:
                    living.asked = living.asked or message.asks_to_stop
                    living.signal(signum, if_caught=if_caught)
            case messages.Input(rank=rank, text=text, end=end):
                if (living := self.attempts.living()) is not None:
                    living.write_input(rank, text, end=end)
            case messages.TerminalSize(columns=columns, rows=rows):
                self._resize(columns, rows)
            case messages.Goodbye():
                self._goodbye = message
                if message.sentence:
                    self.voice.say(message.sentence)
                self._ended.set()
            case _:
                for part in self.parts:
                    part.take(message)
        return True

    def _resize(self, columns: int, rows: int) -> None:
        """Apply a new terminal size to the running ranks, and to later ones."""
        if self._terminal is not None:
            self._terminal = replace(self._terminal, columns=columns, rows=rows)
            if (living := self.attempts.living()) is not None:
                living.resize(self._terminal)

    def _take_welcome(self, welcome: messages.Welcome) -> None:
        first = self.welcome is None
        self.welcome = welcome
        if self.disk.root is None:  # the disk checks that it stays the same folder
            self.disk.root = self.options.run_directory(welcome.run_id).path
        stuck = self.link.welcome(welcome)
        if stuck is not None:
            self.send(messages.Notice(text=f"between {welcome.node} and the head {stuck}"))
        if first and not self.options.is_head:
            self.voice.say(f"joined run {welcome.run_id} as {welcome.node}")
        self.spawners.announce()
        for text in self._unsaid:
            self.send(messages.Notice(text=text))
        self._unsaid.clear()
        # An agent that reconnects was given up as lost: its workers belong to an attempt that has
        # ended everywhere else.
        self.attempts.kill()

    # The spawner.

    @property
    def is_ending(self) -> bool:
        """Return whether the agent is ending."""
        return self._ended.is_set()

    @property
    def setup_pids(self) -> frozenset[int]:
        """Return the processes of the node's setup."""
        return self._work.pids if self._work is not None else frozenset()

    async def _set_up(self, work: NodeWork) -> None:
        try:
            await work.run(self.tell, self.spawners.start_with)
        except MusterError as error:
            self.spawners.refuse(**refusal_of(error))
        else:
            self.attempts.start_if_ready()

    def tell(self, text: str) -> None:
        """Show the user a sentence, as soon as the head is connected."""
        text = f"{self.options.host}: {text}"
        if self.welcome is not None and self.link.channel is not None:
            self.send(messages.Notice(text=text))
        elif len(self._unsaid) < _MAX_UNSAID:
            self._unsaid.append(text)

    def take_event(self, event: orders.SpawnerEvent) -> None:
        """Handle an event from the spawner."""
        match event:
            case orders.TorchFound():
                for part in self.parts:
                    part.take_torch(event.facts)
            case orders.InterpreterReady():
                for part in self.parts:
                    part.take_torch({})
                self.attempts.start_if_ready()
            case orders.LeaseEnded():
                self.voice.say("the spawner had no message from this agent and ended its workers")
                if (living := self.attempts.living()) is not None:
                    living.note_lost("its agent did not respond, so its workers were ended")
                    living.killed = True
            case orders.ChildStarted() | orders.ChildEnded():
                self.attempts.take_child(event)
            case orders.NoChildLeft():
                proc.leave_sessions(process.session for process in event.left)
                self.spawn(self._finish_attempt(event.left))

    async def take_spawner_loss(self, why: str, *, was_killed: bool) -> None:
        """Handle the death of the spawner, with which all workers have died."""
        for part in self.parts:
            part.end_attempt()
        await self.attempts.lose(why, was_killed=was_killed)

    async def _finish_attempt(self, left: tuple[LeftProcess, ...]) -> None:
        for part in self.parts:
            part.end_attempt()
        await self.attempts.finish(left)

    def waiting(self, attempt: int, workers: list[tuple[int, int]]) -> set[int]:
        """Return the ranks among these (rank, pid) that wait for other ranks; runs in a thread."""
        return set().union(*(part.waiting(attempt, workers) for part in self.parts))

    def settings_of(self, order: messages.StartAttempt) -> WorkerSettings | None:
        """Return the settings of an attempt's workers; None while the node is not set up."""
        welcome, options, environment = self.welcome, self.options, self.spawners.environment
        if welcome is None or (self._work is not None and not self._work.is_done):
            return None
        run_dir = options.run_directory(welcome.run_id)
        extra = {
            contract.SOCKET_VARIABLE: self._socket_path,
            contract.RUN_DIR_VARIABLE: run_dir.path,
        }
        extra |= self._work.variables if self._work is not None else {}
        # Reverse DNS delays every worker's start by 5 s if one answer is lost.
        if "RES_OPTIONS" not in environment:
            extra["RES_OPTIONS"] = "timeout:1 attempts:1"
        if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environment:
            extra["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
        if order.interface is not None:
            extra |= network_variables(order.interface, environment)
        elif "GLOO_SOCKET_IFNAME" not in environment:
            # The address from which the head is reached, unless the user knows better.
            own = self.link.channel.own_address if self.link.channel is not None else None
            address = order.master_addr if options.is_head else options.local_addr or own
            interface = interface_of(address) if address else None
            extra |= {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}
        return WorkerSettings(
            run_id=options.plan.rdzv_id or welcome.run_id,
            run_dir=run_dir,
            role=options.plan.role,
            extra_env=extra,
            base_env=environment,
            shown=_shown(options, welcome.tee),
            saved=options.saved,
            gpus=tuple(visible_gpus()),
            virtual_local_rank=options.plan.virtual_local_rank,
            has_store=self.spawners.has_torch,
            # `--debug` was given, and the user has not named a file.
            nccl_files=contract.DEBUG_VARIABLE in environment
            and "NCCL_DEBUG_FILE" not in environment,
            terminal=self._terminal,
            every_line=options.plan.every_line,
            # muster itself reads a terminal; here is a file or a pipe to read.
            gives_input=options.local_show
            and order.stdin_rank is None
            and sys.stdin is not None
            and not os.isatty(0),
            prefixes=(welcome.tee == "all" and order.world_size > 1)
            or (options.local_show and options.num_workers > 1),
        )

    # Workers' reports, and signals.

    async def _take_report(self, call: ipc.IpcCall[ipc.WorkerReport]) -> None:
        report, attempt = call.request, self.attempts.last
        if isinstance(report, ipc.AskMemory):
            await call.reply(self._memory.answer(report))
            return
        rank = attempt.note_report(call.root, report) if attempt is not None else None
        if rank is not None:
            match report:
                case ipc.DebuggerHeld():
                    self.send(messages.Debugger(rank=rank, **vars(report)))
                case ipc.StopAhead():
                    self.send(messages.LastStop(rank=rank, reason=report.reason[:200]))
                case ipc.TrainingOver(step=step, saved_step=saved):
                    self.send(messages.TrainingEnded(rank=rank, step=step, saved_step=saved))
        await call.reply(ipc.CallTaken())

    def _read_stdin(self, fd: int) -> None:
        """Send what is typed here to the first rank of this node."""
        if os.tcgetpgrp(fd) != os.getpgrp():
            return  # in the background: reading would stop us
        data = os.read(fd, 4096)
        if not data:
            asyncio.get_running_loop().remove_reader(fd)
        if (living := self.attempts.living()) is not None:
            rank = living.order.ranks.first_rank
            living.write_input(rank, data.decode(errors="replace"), end=not data)

    def _take_signal(self, signum: signal.Signals) -> None:
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            if (living := self.attempts.living()) is not None:
                living.signal(signum, if_caught=True)
            return
        if self._ended.is_set():
            return  # at its end, a job signals all of its processes
        if self.link.channel is None:
            when = "before it had joined" if self.welcome is None else "while it called its head"
            self.fail(MusterError(f"this agent received {signum.name} {when}"))
            return
        self._is_taken_away |= signum == contract.OVERUSED_SIGNAL
        self.send(messages.SignalReceived(signum=int(signum)))


def _shown(options: AgentOptions, tee: str) -> Callable[[int, int], frozenset[int]]:
    """Return a function from (rank, local rank) to the streams that the terminal shows."""
    console = options.console
    if console is not None:
        return lambda rank, local_rank: console(local_rank)
    both, none = frozenset({1, 2}), frozenset[int]()
    return lambda rank, local_rank: both if tee == "all" or (tee == "0" and not rank) else none


def _as_muster_error(error: BaseException | None) -> MusterError:
    return error if isinstance(error, MusterError) else found_bug("the agent", error)


class AgentPart:
    """A part of an agent: what a node does besides running workers. The base class does nothing.

    Each agent makes its own parts. Rooms plug theirs in as `agent_parts` (docs/plugging-in.md).
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    async def serve(self) -> None:
        """Work while the agent lives; cancelled at its end."""

    def take(self, message: messages.Message) -> bool:
        """Handle a message from the head; return whether it was for this part."""
        del message
        return False

    def take_torch(self, found: Mapping[str, Any]) -> None:
        """Handle facts about the torch that the spawner will import; empty once it is ready."""

    def waiting(self, attempt: int, workers: list[tuple[int, int]]) -> set[int]:
        """Return the ranks among these (rank, pid) that wait for other ranks; runs in a thread."""
        del attempt, workers
        return set()

    def end_attempt(self) -> None:
        """End what belongs to the workers of the attempt, which has ended."""

    def close(self) -> None:
        """Release all resources."""
