"""The agent of one node: keeps a spawner, obeys the head, and never lets workers outlive it.

Without its lease (`head_link`) the workers are killed: a node that nobody hears can't train beside its successors.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import string
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torchmuster
from torchmuster import proc
from torchmuster.diagnose.facts.gpus import visible_gpus
from torchmuster.errors import MusterError
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.model import contract
from torchmuster.model.display.terminal import Terminal
from torchmuster.model.failure import WorkerEnd
from torchmuster.model.lease import (
    LEASE_S,
    PING_EVERY_S,
    Stillness,
)
from torchmuster.model.plan import Program
from torchmuster.model.ranks import NodeRanks
from torchmuster.net import messages
from torchmuster.net.address import interface_of
from torchmuster.net.ipc import IpcCall, IpcServer
from torchmuster.net.ipc_messages import (
    CallTaken,
    DebuggerHeld,
    StopAhead,
    TrainingOver,
    WorkerReport,
)
from torchmuster.node.error_file import root_cause
from torchmuster.node.facts import FactsServer
from torchmuster.node.head_link import AgentRefusedError, HeadLink, HeadPlace
from torchmuster.node.setup import NodeWork, other_interpreter, refusal_of
from torchmuster.node.spawner import messages as orders
from torchmuster.node.spawner.link import SpawnerLink
from torchmuster.node.spawner.start import make_link, start_spawner
from torchmuster.node.voice import Voice
from torchmuster.node.workers import NodeAttempt, WorkerSettings

if TYPE_CHECKING:
    from torchmuster.node.probe import NetworkProbe
    from torchmuster.node.progress import NodeProgress
    from torchmuster.node.task.exec import Execs

PROGRESS_EVERY_S = 2.0
_MAX_UNSENT_SHOW_BYTES = 1 << 20
_REAP_EVERY_S = 0.01
_STOPPED_S = 3.0
_UNKNOWN_S = 1.0  # a worker may call before its spawner has come to say that it has started
_MAX_EARLY_DEATHS = 3
_MAX_UNSAID = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent is told when it is started.

    Attributes:
        head: Where the head is.
        take_store: Returns the listening socket of an attempt's store, on the head only.
        local_show: Show this node's output here instead of sending it to the head.
        terminal: What shows it is a terminal: the ranks that are shown get one, too.
    """

    program: Program
    num_workers: int
    host: str
    head: HeadPlace
    run_dir: Callable[[str], RunDir]
    place: int | None = None
    role: str = "default"
    is_head: bool = False
    take_store: Callable[[int], Any] | None = None
    local_show: bool = False
    terminal: Terminal | None = None
    virtual_local_rank: bool = False
    rdzv_id: str | None = None
    local_addr: str | None = None
    console: Callable[[int], frozenset[int]] | None = None
    saved: Callable[[int, int, int], str | None] | None = None
    stdin_fd: int | None = None
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)
    environment: dict[str, str] = field(default_factory=dict)
    jobs: tuple[str, ...] = ()


class Agent:
    """One agent process."""

    def __init__(
        self,
        options: AgentOptions,
        spawner: tuple[proc.Child, Any] | None,
        socket_path: str,
        disk: DiskWriter,
        voice: Voice,
        work: NodeWork | None = None,
    ) -> None:
        self.options = options
        self.disk = disk
        self.voice = voice
        self._first_spawner = spawner
        self._work = work
        self._unsaid: list[str] = []
        self._socket_path = socket_path
        self._incarnation = secrets.token_hex(8)
        self._spawner: SpawnerLink | None = None
        self._ready: orders.InterpreterReady | None = None
        self._refusal: messages.SpawnerRefused | None = None
        self._num_early_deaths = 0  # of spawners, while they imported
        self._waiting_order: messages.StartAttempt | None = None
        self._attempt: NodeAttempt | None = None
        self._welcome: messages.Welcome | None = None
        self.link = HeadLink(options.head, voice.say)
        clock = self.link.clock
        self._still = {"spawner": Stillness(clock), "store": Stillness(clock)}
        self._store_pid: int | None = None
        self._goodbye: messages.Goodbye | None = None
        self._lost_lines: dict[str, int] = {}
        self._not_shown: dict[int, int] = {}  # lines of a rank that the channel had no room for
        self._terminal = options.terminal
        self._probe: NetworkProbe | None = None
        self._facts = FactsServer(self._send)
        self._execs: Execs | None = None
        self._ended = asyncio.Event()
        self._failure: MusterError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # Life.

    async def run(self) -> int:
        """Serve until the run is over; return the exit code.

        Raises:
            MusterError: The run ended for this agent: refused, or its head is gone.
        """
        proc.become_subreaper()
        loop = asyncio.get_running_loop()

        def lose(lines: int, why: str) -> None:
            loop.call_soon_threadsafe(self._lose, lines, why)

        self.disk.on_loss = lose
        worker_socket = IpcServer(
            self._socket_path,
            self._worker_pids,
            WorkerReport,
            self._take_report,
            unknown_s=_UNKNOWN_S,
            on_odd=self._tell_of_odd_report,
        )
        await worker_socket.open()
        for signum in (*self.options.signals, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(signum, self._take_signal, signum)
        if self._first_spawner is not None:
            self._adopt_spawner(*self._first_spawner)
        if self._work is not None and not self._work.is_done:
            self._spawn(self._set_up(self._work))
        if self.options.local_show and self._terminal is not None:
            screen = min(self._terminal.streams)
            loop.add_signal_handler(
                signal.SIGWINCH, lambda: self._resize(*os.get_terminal_size(screen))
            )
        if self.options.stdin_fd is not None:
            loop.add_reader(self.options.stdin_fd, self._read_stdin, self.options.stdin_fd)
        connection = loop.create_task(self._stay_connected())
        lease = loop.create_task(self._watch_lease())
        self._spawn(self._tell_progress())
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
            self._close_probe()
            if self.link.channel is not None:
                await self.link.channel.close()
        if self._failure is not None:
            raise self._failure
        return self._goodbye.exit_code if self._goodbye is not None else 1

    @property
    def error_text(self) -> str | None:
        """The last attempt's first failure on this node, as torchrun writes it."""
        attempt = self._attempt
        return root_cause(attempt.ends, attempt.error_texts) if attempt is not None else None

    def fail(self, error: MusterError) -> None:
        """End the agent with this error."""
        self._failure = self._failure or error
        self._ended.set()

    def leave(self, code: int) -> None:
        """End the agent with the run's exit code, unless the head's goodbye came before."""
        self._goodbye = self._goodbye or messages.Goodbye(exit_code=code)
        self._ended.set()

    async def _end_all_processes(self) -> None:
        """Close the spawner's pair, then kill until nothing is left below us."""
        if self._spawner is not None:
            self._spawner.close()
            deadline = time.monotonic() + 1.0
            while self._spawner.exit_status() is None and time.monotonic() < deadline:
                await asyncio.sleep(_REAP_EVERY_S)
            self._spawner.kill()
        while proc.end_children():
            await asyncio.sleep(_REAP_EVERY_S)
        if self._attempt is not None and not self._attempt.reaped:
            await self._attempt.finish()

    def _spawn(self, work: Awaitable[None]) -> None:
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
            if self._goodbye is None and self._welcome is not None:
                self.voice.say(f"the connection to the head ended: {why}; calling again")

    def _hello(self) -> messages.Hello:
        running = self._attempt is not None and not self._attempt.reaped
        return messages.Hello(
            incarnation=self._incarnation,
            version=torchmuster.__version__,
            host=self.options.host,
            pid=os.getpid(),
            boot_id=proc.boot_id(),
            num_workers=self.options.num_workers,
            place=self.options.place,
            spawner_pid=self._spawner.pid if self._spawner else None,
            attempt=self._attempt.attempt if running and self._attempt else None,
            wants_place_0=self.options.is_head,
            network_id=proc.network_id(),
            jobs=self.options.jobs,
        )

    async def _watch_lease(self) -> None:
        """Keep the spawner's lease alive while ours is; kill the workers when ours has ended."""
        while True:
            await asyncio.sleep(PING_EVERY_S / 2)
            if self._spawner is not None:
                self._spawner.order(orders.PingSpawner())
                self._end_who_stands_still(self._spawner)
            silent_s = self.link.silent_s()
            if silent_s is not None:
                self._end_lease(silent_s)

    def _end_who_stands_still(self, spawner: SpawnerLink) -> None:
        """A spawner or a store that stands still ends nothing by itself: its death has consequences."""
        for name, pid in (("spawner", spawner.pid), ("store", self._store_pid)):
            facts = proc.read_process(pid) if pid is not None else None
            if facts is None or (name == "store" and facts.parent_pid != spawner.pid):
                continue
            answers = name == "spawner" and self._ready is not None
            if self._still[name].is_lost(facts.state, answers=answers):
                self._still[name].begin()
                self.tell(f"the {name} has not responded for {LEASE_S:.0f} s: it is killed")
                spawner.kill() if name == "spawner" else proc.kill_quietly(facts.pid)

    def _end_lease(self, silent_s: float) -> None:
        attempt = self._attempt
        if attempt and not attempt.killed and not attempt.reaped:
            self.voice.say(
                f"no message from the head for {silent_s:.0f} s: this node's workers are killed"
            )
            attempt.note_lost("its agent had no message from the head and ended its workers")
            self._kill_workers()
        self.link.end_silent()

    def _send(self, message: messages.Message) -> None:
        self.link.send(message)

    # Orders of the head.

    async def _obey(self, message: messages.Message) -> bool:
        """Do what the head orders; its goodbye ends the agent, and the conversation with it."""
        match message:
            case messages.Welcome():
                self._take_welcome(message)
            case messages.Refused(sentence=sentence):
                self.fail(AgentRefusedError(sentence))
            case messages.StartAttempt():
                self._waiting_order = message
                self._start_if_ready()
            case messages.KillAttempt(attempt=attempt, ended_well=ended_well):
                self._waiting_order = None
                if (
                    self._attempt is None
                    or self._attempt.attempt != attempt
                    or self._attempt.reaped
                ):
                    self._send(messages.AllReaped(attempt=attempt))
                else:
                    self._kill_workers(ended_well=ended_well)
            case messages.SignalWorkers(signum=signum, if_caught=if_caught):
                if self._attempt is not None and not self._attempt.reaped:
                    self._attempt.asked = self._attempt.asked or message.asks_to_stop
                    self._attempt.signal(signum, if_caught=if_caught)
            case messages.Input(rank=rank, text=text, end=end):
                if self._attempt is not None and not self._attempt.reaped:
                    self._attempt.write_input(rank, text, end=end)
            case messages.TerminalSize(columns=columns, rows=rows):
                self._resize(columns, rows)
            case messages.AskNetwork() | messages.ProbeNetwork() | messages.EndProbe():
                self._take_survey(message)
            case messages.AskFacts():
                self._take_ask(message)
            case messages.TakeStacks():
                self._spawn(self._take_stacks(message))
            case (
                messages.ExecStart()
                | messages.ExecInput()
                | messages.ExecTaken()
                | messages.ExecResize()
                | messages.ExecSignal()
                | messages.ExecLeave()
            ):
                self._take_exec(message)
            case messages.Goodbye():
                self._goodbye = message
                if message.sentence:
                    self.voice.say(message.sentence)
                self._ended.set()
        return True

    def _resize(self, columns: int, rows: int) -> None:
        """Take the size of the terminal that shows ranks: for those that run, and for later ones."""
        if self._terminal is not None:
            self._terminal = replace(self._terminal, columns=columns, rows=rows)
            if self._attempt is not None and not self._attempt.reaped:
                self._attempt.resize(self._terminal)

    def _take_survey(
        self, message: messages.AskNetwork | messages.ProbeNetwork | messages.EndProbe
    ) -> None:
        from torchmuster.node.network_settings import network_facts
        from torchmuster.node.probe import NetworkProbe

        options = self.options
        if isinstance(message, messages.AskNetwork):
            self._close_probe()
            secrets = (options.head.secret, options.head.open_secret)
            self._probe = NetworkProbe(message.survey, secrets, self._send)
            ports = self._probe.open()
            self._send(
                network_facts(message.survey, ports, options.environment, options.local_addr)
            )
        elif self._probe is None or self._probe.survey != message.survey:
            return
        elif isinstance(message, messages.ProbeNetwork):
            self._probe.begin(message)
        else:
            self._close_probe()

    def _take_ask(self, ask: messages.AskFacts) -> None:
        if self._welcome is not None:
            run_dir = self.options.run_dir(self._welcome.run_id)
            self._facts.take(ask, self.options.program, self.options.environment, run_dir)

    def _close_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _take_welcome(self, welcome: messages.Welcome) -> None:
        first = self._welcome is None
        self._welcome = welcome
        self.disk.settle_in(self.options.run_dir(welcome.run_id).path)
        stuck = self.link.welcome(welcome)
        if stuck is not None:
            self._send(messages.Notice(text=f"between {welcome.node} and the head {stuck}"))
        if first and not self.options.is_head:
            self.voice.say(f"joined run {welcome.run_id} as {welcome.node}")
        if self._ready is not None:
            self._announce_spawner(self._ready)
        if self._refusal is not None:
            self._send(self._refusal)
        for text in self._unsaid:
            self._send(messages.Notice(text=text))
        self._unsaid.clear()
        # An agent that calls again was given up for lost: its workers belong to an attempt that has
        # ended everywhere else.
        self._kill_workers()

    # The spawner.

    def _adopt_spawner(self, child: proc.Child, control: Any) -> None:
        self._ready = None
        self._still["spawner"].begin()
        self._spawner = make_link(
            child, control, _in_two_turns(self._take_event), _in_two_turns(self._lose_spawner)
        )
        self._spawner.say, self._spawner.tell = self.voice.print, self.tell
        self._spawner.open()

    async def _set_up(self, work: NodeWork) -> None:
        try:
            await work.run(self)
        except MusterError as error:
            self._refuse(**refusal_of(error))
        else:
            self._start_if_ready()

    def tell(self, text: str) -> None:
        """Say a sentence to the user: now, or as soon as the head is there."""
        text = f"{self.options.host}: {text}"
        if self._welcome is not None and self.link.channel is not None:
            self._send(messages.Notice(text=text))
        elif len(self._unsaid) < _MAX_UNSAID:
            self._unsaid.append(text)

    def start_with(self, program: Program, environment: Mapping[str, str]) -> None:
        """Take the job's interpreter and variables, and start the spawner unless one runs.

        Raises:
            MusterError: No interpreter can be executed on this node.
        """
        self.options = replace(self.options, program=program, environment=dict(environment))
        if self._spawner is not None:
            return
        try:
            started = start_spawner(program, environment, self._socket_path)
        except MusterError as error:
            other = other_interpreter(program, environment)
            if other is None:
                raise
            self.tell(f"{program.python[0]} can't run here ({error.why}): {other.python[0]} does")
            self.options = replace(self.options, program=other)
            started = start_spawner(other, environment, self._socket_path)
        self._adopt_spawner(*started)

    def _refuse(self, why: str, **more: Any) -> None:
        self._refusal = self._refusal or messages.SpawnerRefused(why=why, **more)
        self._send(self._refusal)

    def _take_event(self, event: orders.SpawnerEvent) -> None:
        match event:
            case orders.SpawnerPong():
                self._still["spawner"].begin()
            case orders.TorchFound():
                self._facts.take_torch(event.facts)
            case orders.InterpreterReady():
                self._facts.take_torch({})
                self._ready, self._num_early_deaths = event, 0
                self._announce_spawner(event)
                self._start_if_ready()
            case orders.InterpreterRefused():
                self._refuse(event.why)
            case orders.FellBack():
                self._send(messages.Notice(text=_fell_back(event.why)))
            case orders.LeaseEnded():
                self.voice.say("the spawner had no message from this agent and ended its workers")
                if self._attempt is not None and not self._attempt.reaped:
                    self._attempt.note_lost("its agent did not respond, so its workers were ended")
                    self._attempt.killed = True
            case orders.ChildStarted(kind="worker") if self._attempt is not None:
                self._attempt.note_started(event.rank, event.pid)
                self._announce_start()
            case orders.ChildStarted(kind="store"):
                self._store_pid = event.pid
                self._still["store"].begin()
            case orders.ChildEnded() if self._attempt is not None:
                self._take_exit(self._attempt, event)
            case orders.NoChildLeft():
                proc.leave_sessions(process.session for process in event.left)
                self._spawn(self._finish_attempt(event.left))

    def _announce_spawner(self, ready: orders.InterpreterReady) -> None:
        why = _fell_back(ready.why) if ready.why else None
        self._send(
            messages.SpawnerReady(
                python=ready.python, torch=ready.torch, forks=ready.forks, why=why
            )
        )

    def _announce_start(self) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.all_started:
            self._send(
                messages.WorkersStarted(
                    attempt=attempt.attempt,
                    pids=attempt.pids,
                    spawner_pid=self._spawner.pid if self._spawner else None,
                )
            )

    def _take_exit(self, attempt: NodeAttempt, event: orders.ChildEnded) -> None:
        if event.kind == "worker":
            attempt.note_exit(event.rank, event.status)
        elif not attempt.killed:
            detail = _describe_status(event.status)
            self._send(messages.StoreLost(attempt=attempt.attempt, detail=detail))

    def _lose_spawner(self) -> None:
        spawner, self._spawner = self._spawner, None  # an order that comes now waits for the next
        if spawner is not None and not self._ended.is_set():
            self._spawn(self._replace_spawner(spawner))

    async def _replace_spawner(self, spawner: SpawnerLink) -> None:
        attempt = self._attempt
        deadline = time.monotonic() + 5.0
        while (status := spawner.exit_status()) is None and time.monotonic() < deadline:
            await asyncio.sleep(_REAP_EVERY_S)
        killed = status is not None and status < 0
        self._num_early_deaths += self._ready is None
        if self._ready is None and not (killed and self._num_early_deaths < _MAX_EARLY_DEATHS):
            why = "it ended before it was ready" if status is None else _describe_exit(status)
            ended = f"the job's interpreter ended: {why}"
            because = "\n".join(text for text in (spawner.said, ended) if text)
            self._refuse(because, **spawner.last_words())
            return
        spawner.kill()
        keep = self._work.pids if self._work is not None else frozenset[int]()
        while proc.end_children(keep):  # its workers died with it; what they started is ours now
            await asyncio.sleep(_REAP_EVERY_S)
        new = await asyncio.to_thread(
            start_spawner, self.options.program, self.options.environment, self._socket_path
        )
        self._adopt_spawner(*new)
        if attempt is not None and not attempt.reaped:
            ended = _describe_exit(status if status is not None else -int(signal.SIGKILL))
            attempt.note_lost(f"its spawner ended ({ended})")
            await self._finish_attempt()

    # Attempts.

    def _start_if_ready(self) -> None:
        order, welcome = self._waiting_order, self._welcome
        if order is None or welcome is None or self._ready is None or self._spawner is None:
            return
        if self._attempt is not None and not self._attempt.reaped:
            return
        if self._work is not None and not self._work.is_done:
            return
        self._waiting_order = None
        attempt = NodeAttempt(
            order, self._settings(welcome, order), self._spawner, self._report_end
        )
        self._attempt = attempt
        self._prefix_lines(order.ranks)
        store = self.options.take_store(order.attempt) if self.options.take_store else None
        if store is not None and self._ready.torch is not None:
            host, port = order.master_addr, order.master_port
            fd = os.dup(store.fileno())
            self._spawner.order(orders.StartStore(host=host, port=port), [fd])
        if store is not None:
            store.close()
        attempt.start(self.disk, self._show)
        for problem in attempt.problems:
            self.tell(problem)

    def _prefix_lines(self, ranks: NodeRanks) -> None:
        """Let the lines shown here begin as torchrun's template says, if there is one."""
        template = self.options.environment.get(contract.PREFIX_VARIABLE)
        if not template or not self.options.local_show:
            return
        for local_rank in range(ranks.num_workers):
            rank, role = ranks.first_rank + local_rank, self.options.role
            words = {"role_name": role, "rank": rank, "local_rank": local_rank}
            self.voice.prefix_rank(rank, string.Template(template).safe_substitute(words))

    def _settings(self, welcome: messages.Welcome, order: messages.StartAttempt) -> WorkerSettings:
        extra = {contract.SOCKET_VARIABLE: self._socket_path}
        run_dir = self.options.run_dir(welcome.run_id)
        extra[contract.RUN_DIR_VARIABLE] = run_dir.path
        extra |= self._work.variables if self._work is not None else {}
        environment = self.options.environment
        # Reverse DNS stalls every worker's start by 5 s when one answer is lost.
        if "RES_OPTIONS" not in environment:
            extra["RES_OPTIONS"] = "timeout:1 attempts:1"
        if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environment:
            extra["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
        extra.update(self._network_variables(order))
        return WorkerSettings(
            run_id=self.options.rdzv_id or welcome.run_id,
            run_dir=run_dir,
            role=self.options.role,
            extra_env=extra,
            base_env=environment,
            shown=self._shown(welcome.tee),
            saved=self.options.saved,
            gpus=tuple(visible_gpus()),
            virtual_local_rank=self.options.virtual_local_rank,
            has_store=self._ready is not None and self._ready.torch is not None,
            nccl_files=_wants_nccl_files(environment),
            terminal=self._terminal,
            prefixes=(welcome.tee == "all" and order.world_size > 1)
            or (self.options.local_show and self.options.num_workers > 1),
        )

    def _network_variables(self, order: messages.StartAttempt) -> dict[str, str]:
        environment = self.options.environment
        if order.interface is not None:
            from torchmuster.node.network_settings import network_variables

            return network_variables(order.interface, environment)
        address = order.master_addr if self.options.is_head else self._own_address()
        interface = interface_of(address) if address else None
        if interface is None or "GLOO_SOCKET_IFNAME" in environment:
            return {}
        return {"GLOO_SOCKET_IFNAME": interface}

    def _shown(self, tee: str) -> Callable[[int, int], frozenset[int]]:
        """Return which streams of (rank, local rank) the terminal shows."""
        console = self.options.console
        if console is not None:
            return lambda rank, local_rank: console(local_rank)
        both, none = frozenset({1, 2}), frozenset[int]()
        return lambda rank, local_rank: both if tee == "all" or (tee == "0" and not rank) else none

    def _own_address(self) -> str | None:
        if self.options.local_addr is not None:
            return self.options.local_addr
        return self.link.channel.own_address if self.link.channel is not None else None

    def _report_end(self, end: WorkerEnd) -> None:
        self._send(messages.WorkerEnded(end=end))

    def _kill_workers(self, *, ended_well: bool = False) -> None:
        if self._attempt is not None and not self._attempt.reaped:
            self._attempt.killed = True
            if self._spawner is not None:
                self._spawner.order(orders.KillChildren(ended_well=ended_well))
                loop = asyncio.get_running_loop()
                loop.call_later(_STOPPED_S, self._end_stopped_spawner, self._attempt)

    def _end_stopped_spawner(self, attempt: NodeAttempt) -> None:
        """A spawner that stands still (SIGSTOP) obeys no order; its death is its workers' death."""
        if self._attempt is attempt and not attempt.reaped and self._spawner is not None:
            facts = proc.read_process(self._spawner.pid)
            if facts is not None and facts.state in ("T", "t"):
                self.voice.say(
                    "the spawner does not respond: it is killed, and its workers with it"
                )
                self._spawner.kill()

    async def _finish_attempt(self, left: tuple[proc.LeftProcess, ...] = ()) -> None:
        attempt = self._attempt
        if attempt is None or attempt.reaped:
            return
        await attempt.finish()
        if self._execs is not None:
            self._execs.end_all("the attempt has ended")
        self._send(messages.AllReaped(attempt=attempt.attempt, left=left))
        self._start_if_ready()

    # Where the workers stand.

    async def _tell_progress(self) -> None:
        """Tell every two seconds how far the workers are."""
        reader: NodeProgress | None = None
        folder = os.path.dirname(self._socket_path)
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            attempt = self._attempt
            if (
                attempt is None
                or attempt.reaped
                or not attempt.running
                or self.link.channel is None
            ):
                continue
            if reader is None or reader.attempt != attempt.attempt:
                from torchmuster.node import progress

                reader = progress.NodeProgress(folder, attempt.attempt)
            ranks = await asyncio.to_thread(reader.read, attempt.running)
            if attempt is self._attempt:
                self._send(messages.Progress(attempt=attempt.attempt, ranks=ranks))

    async def _take_stacks(self, order: messages.TakeStacks) -> None:
        from torchmuster.node.stacks import pieces, take_stacks

        attempt = self._attempt
        running = attempt.running if attempt is not None and not attempt.reaped else []
        folder = os.path.dirname(self._socket_path)
        logs = {rank: attempt.log_of(rank) for rank, _ in running} if attempt is not None else {}
        stacks = await asyncio.to_thread(take_stacks, folder, order.attempt, running, logs=logs)
        for piece, is_last in pieces(stacks):
            self._send(messages.Stacks(number=order.number, stacks=piece, is_last=is_last))

    def _take_exec(self, message: messages.FromExecClient) -> None:
        from torchmuster.node import rank_exec
        from torchmuster.node.task.exec import Execs

        if self.link.channel is not None and self.link.channel.is_open:
            if isinstance(message, messages.ExecStart):
                self._send(rank_exec.refuse_unproved(message))
            return
        if self._execs is None:
            self._execs = Execs(self.options.host, self._send)
        attempt, target = self._attempt, None
        if attempt is not None and not attempt.reaped and isinstance(message, messages.ExecStart):
            ranks = attempt.order.ranks
            rank = rank_exec.wanted_rank(message, ranks.first_rank, ranks.num_workers)
            pid = dict(attempt.running).get(rank)
            if pid is not None:
                worker = attempt.environment_of(rank)
                every = rank_exec.whole_environment(self.options.environment, worker)
                of_rank = message.task.startswith("rank ")
                target = rank_exec.rank_target(pid, rank_exec.node_environment(every, of_rank))
        self._execs.take(message, target)

    # What workers and the system say.

    def _worker_pids(self) -> set[int]:
        return self._attempt.running_pids if self._attempt is not None else set()

    async def _take_report(self, call: IpcCall[WorkerReport]) -> None:
        report = call.request
        rank = self._attempt.note_report(call.root, report) if self._attempt is not None else None
        if rank is not None:
            match report:
                case DebuggerHeld():
                    self._send(messages.Debugger(rank=rank, active=report.active))
                case StopAhead():
                    self._send(messages.LastStop(rank=rank, reason=report.reason[:200]))
                case TrainingOver(step=step, saved_step=saved):
                    self._send(messages.TrainingEnded(rank=rank, step=step, saved_step=saved))
        await call.reply(CallTaken())

    def _tell_of_odd_report(self, why: str) -> None:
        self.tell(
            f"a worker told its agent what it does not understand ({why}): another torchmuster?"
        )

    def _show(self, rank: int, stream: int, text: str, left_out: int) -> None:
        if self.options.local_show:
            self.voice.show(rank, stream, text, left_out)
            return
        channel, attempt = self.link.channel, self._attempt
        if channel is None or attempt is None or channel.unsent_bytes > _MAX_UNSENT_SHOW_BYTES:
            self._not_shown[rank] = self._not_shown.get(rank, 0) + left_out + text.count("\n")
            return
        left_out += self._not_shown.pop(rank, 0)
        for start in range(0, len(text) or 1, 1 << 16):
            channel.send_nowait(
                messages.Output(
                    rank=rank,
                    attempt=attempt.attempt,
                    stream=stream,
                    text=text[start : start + (1 << 16)],
                    dropped_lines=left_out if start == 0 else 0,
                )
            )

    def _read_stdin(self, fd: int) -> None:
        """Give what is typed here to the first rank of this node."""
        if os.tcgetpgrp(fd) != os.getpgrp():
            return  # in the background: reading would stop us
        data = os.read(fd, 4096)
        if not data:
            asyncio.get_running_loop().remove_reader(fd)
        if self._attempt is not None and not self._attempt.reaped:
            rank = self._attempt.order.ranks.first_rank
            self._attempt.write_input(rank, data.decode(errors="replace"), end=not data)

    def _lose(self, lines: int, why: str) -> None:
        first = why not in self._lost_lines
        self._lost_lines[why] = self._lost_lines.get(why, 0) + lines
        if first:
            text = f"logs are being lost on {self.options.host}: {why}; the job continues"
            self._send(messages.Notice(text=text, level="warning", logs_lost_lines=lines))
        else:
            self._send(messages.Notice(text="", logs_lost_lines=lines))

    def _take_signal(self, signum: signal.Signals) -> None:
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            if self._attempt is not None and not self._attempt.reaped:
                self._attempt.signal(signum, if_caught=True)
            return
        if self.link.channel is None:
            self.fail(MusterError(f"this agent received {signum.name} before it had joined"))
            return
        self._send(messages.SignalReceived(signum=int(signum)))


def _in_two_turns(hear: Callable[..., None]) -> Callable[..., None]:
    """Return a callback that hears two turns of the loop later.

    A scheduler's SIGTERM reaches workers and agent at once. Its handler runs in the turn after the one that noticed it, and
    must come before the word of a worker that has ended by it: else a cancelled run looks like one that is complete.
    """

    def later(*values: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(hear, *values))

    return later


def _wants_nccl_files(environment: Mapping[str, str]) -> bool:
    """Say whether `--debug` was given and the user has not named a file himself."""
    return contract.DEBUG_VARIABLE in environment and "NCCL_DEBUG_FILE" not in environment


def _fell_back(why: str) -> str:
    return f"workers are started as fresh interpreters, not forked: {why}"


def _describe_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return contract.signal_name(os.WTERMSIG(status))
    return f"exit code {os.WEXITSTATUS(status)}"


def _describe_exit(status: int) -> str:
    return contract.signal_name(-status) if status < 0 else f"exit code {status}"


def _as_muster_error(error: BaseException | None) -> MusterError:
    if isinstance(error, MusterError):
        return error
    with contextlib.suppress(Exception):
        import traceback

        why = "".join(traceback.format_exception(error)) if error else ""
        return MusterError("the agent met a bug in muster", why=why, fix="please report this")
    return MusterError("the agent met a bug in muster")
