"""The owner of a run on this machine: starts agents, follows the head, and replaces lost ones.

`muster run` is this process; with `--detach` it is a background process. When it dies the run ends:
the agents see the end of their lifeline.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torchmuster.core import proc
from torchmuster.core.files.layout import last_lines
from torchmuster.core.model import codec, events, owner_policy
from torchmuster.core.model.contract import MACHINE_VARIABLE, describe_exit
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import name_on, report_of_error
from torchmuster.core.model.verdict import Report, Result, StopCause, cause_of_stop, end_by_stop
from torchmuster.core.net import messages
from torchmuster.core.node.setup import start_removing_leftovers
from torchmuster.core.owner import parts
from torchmuster.core.owner.record import next_attempt, read_result, recorded_seconds
from torchmuster.core.owner.session import EarlyStop, own_terminal
from torchmuster.core.proc import describe_end
from torchmuster.errors import HeadLostError, MusterError

_POLL_S = 0.01
_WATCH_S = 0.2
_SWEEP_LIMIT_S = 5.0  # staged data takes longer: the next run continues
_END_LIMIT_S = 12.0  # from the kill
_LEAVE_S = 1.0
_STOP_LOOK_S = 0.3
_REMOVE_LIMIT_S = 120.0
_DEPOSED_S = 2.0


def own_run(
    engine: parts.Engine,
    display: parts.RunDisplay,
    *,
    deadline: parts.Deadline | None = None,
    forward_stdin: bool = False,
    early: EarlyStop | None = None,
    is_deposed: Callable[[], bool] | None = None,
) -> Result:
    """Follow a run to its end, after its engine has started the agents.

    Raises:
        HeadLostError: Another node has become the head, according to `is_deposed`: the run
            continues without us.
    """
    supervisor = RunOwner(
        engine, display, deadline, forward_stdin, early=early, is_deposed=is_deposed
    )
    return asyncio.run(supervisor.run())


@dataclass(slots=True)
class RunOwner:
    """Owns one run.

    Attributes:
        deadline: The end of the job's time; None without a job.
        early: Caught stop signals before this starts; None if nothing did.
        is_deposed: Returns whether another node's head has taken over; None if that can't happen.
            It may read a disk.
        requests: The requests to stop so far.
    """

    engine: parts.Engine
    display: parts.RunDisplay
    deadline: parts.Deadline | None = None
    forward_stdin: bool = False
    early: EarlyStop | None = None
    is_deposed: Callable[[], bool] | None = None
    requests: owner_policy.StopRequests = field(default_factory=owner_policy.StopRequests)
    result: Result | None = None
    _policy: owner_policy.OwnerPolicy = field(init=False)
    _next_attempt: int = 0
    _stops: parts.Stops = field(init=False)
    _head: parts.HeadFollower = field(init=False)
    _record: parts.RecordWriter = field(init=False)
    _input: parts.StandardInput | None = None
    _has_gone: bool = False
    _wanted: set[int] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        plan = self.engine.plan
        self._policy = owner_policy.OwnerPolicy(
            plan.node_name(self.engine.head_place),
            owner_policy.RestartBudget(plan.limits.max_restarts),
            self.requests,
            plan.limits.grace_s,
        )
        # The library saves when asked to stop, and has a record.
        may_save = partial(os.path.exists, self.engine.run_dir.training)
        self._stops = parts.Stops(self._judge_stop, may_save, requests=self.requests)
        self._head = parts.HeadFollower(
            self.engine.run_dir,
            policy=self._policy,
            stops=self._stops,
            state=lambda: self.engine.head_state,
            kill=self.engine.kill_head,
            hear=self._take,
            say=self.display.say,
        )
        self._record = parts.RecordWriter(self.engine.run_dir, self.display.say)

    async def run(self) -> Result:
        """Follow the run, whose agents have been started, to its end."""
        async with self._record:
            return await self._follow()

    async def _follow(self) -> Result:
        loop = asyncio.get_running_loop()
        self._stops.listen(self._take_stop, self.early)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(signum, self._handle_user_signal, signum)
        loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        loop.add_signal_handler(signal.SIGWINCH, self._send_size)
        watching = [] if self.is_deposed is None else [loop.create_task(self._end_if_deposed())]
        if self.deadline is not None:
            if self.deadline.limit.ends_at is not None:
                self._act(owner_policy.TellEnd(self.deadline.limit.ends_at))
            watching.append(loop.create_task(self.deadline.watch(self._act)))
        try:
            while self.result is None:
                self._write_head()
                ended = await self._head.follow(self.engine.address, self._watch_agents)
                if self.result is None and ended is not None:
                    await self._replace_head(ended)
        finally:
            for task in watching:
                task.cancel()
            if not self._has_gone:
                await self._end_agents()
            # Remove what killed agents left on this machine: there may be no later run to do it.
            await asyncio.to_thread(start_removing_leftovers(None).join, _SWEEP_LIMIT_S)
        return self.result

    # One head's life.

    async def _watch_agents(self) -> str:
        """Reap agents and start requested ones until the head's agent ends; return how it ended."""
        head_end: int | None = None
        while True:
            for end in self.engine.poll():
                if end.place == self.engine.head_place:
                    head_end = end.status
                elif end.said:
                    why = describe_end(end.status, end.said)
                    failed = messages.StartFailed(place=end.place, why=why, is_gone=end.is_gone)
                    self._head.send(failed)
            if head_end is not None:
                return describe_exit(head_end)
            places, self._wanted = sorted(self._wanted - {self.engine.head_place}), set()
            for place in places:
                self.engine.start_place(place)
            self._changed.clear()
            try:
                async with asyncio.timeout(_WATCH_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    # Messages from the head.

    def _take(self, message: messages.Message) -> bool:
        match message:
            case messages.Event(name=name, fields=fields):
                event = events.event_of(name, fields)
                if event is not None:
                    self._handle_event(event)
            case messages.Output():
                self.display.show(message.rank, message.stream, message.text, message.dropped_lines)
            case messages.NeedNodes(places=places, again=again):
                self._wanted.update(p for p in places if not (again and self.engine.holds(p)))
                self._changed.set()
        return self.result is None

    def _handle_event(self, event: events.RecordEvent) -> None:
        match event:
            case events.RunEndedEvent(result=Result() as result):
                self.result = result
                return
            case events.AttemptStartedEvent(attempt=attempt):
                self._next_attempt = attempt + 1
            case events.AttemptFailedEvent(restarts_left=int(left)):
                self._policy.lives.spent = self._policy.lives.most - left
            case events.LeftRunningEvent(processes=processes):
                proc.leave_sessions(process.session for process in processes)
            case events.WorkersStartedEvent():
                self._send_size()  # it may have changed before workers existed
                if self.forward_stdin:
                    self._begin_input()  # only now: workers exist to receive it
        self.display.tell(event)

    # Loss of the head.

    async def _replace_head(self, ended: str) -> None:
        """Restart a lost head where the record ends; keep the other agents if they can find it."""
        is_replaced = await self._may_be_deposed()
        # If so, end only local processes: leave the commands that started other nodes' agents
        # alone.
        self._has_gone = is_replaced
        if is_replaced or self.engine.keeps_agents:
            await self._reap_head()
        else:
            self.engine.cut_lifeline()
            await self._reap_all(kill_after_s=3.0)
        result = read_result(self.engine.run_dir)  # its last messages may have been lost
        self._next_attempt = max(self._next_attempt, next_attempt(self.engine.run_dir))
        # A first head may be lost for free before the first attempt; later losses count.
        is_free = self._next_attempt == 0 and self._policy.lives.lost == 0
        match self._policy.after_loss(
            has_result=result is not None, is_free=is_free, is_replaced=is_replaced
        ):
            case owner_policy.AfterLoss.ELSEWHERE:
                raise HeadLostError("another node has become the head of this run")
            case owner_policy.AfterLoss.OVER:
                self.result = result
                return
            case owner_policy.AfterLoss.STOPPED:
                self.result = self._stopped_result()
                return
            case owner_policy.AfterLoss.SPENT:
                self.result = self._head_lost(ended)
                return
        keeps = self.engine.keeps_agents
        follows = "another one takes its place" if keeps else "all nodes are started again"
        self.display.say(
            f"the head's agent ended ({ended}): {follows} with attempt {self._next_attempt}"
        )
        await self._start_in_thread(self.engine.start_head if keeps else self.engine.start_all)
        if keeps:  # agents that have ended meanwhile are restarted; the others reconnect
            places = range(self.engine.plan.num_places)
            self._wanted = {place for place in places if not self.engine.holds(place)}

    async def _end_if_deposed(self) -> None:
        """Kill a head that has been replaced elsewhere; `_replace_head` does the rest."""
        while not await self._may_be_deposed():
            await asyncio.sleep(_DEPOSED_S)
        self.engine.kill_head()

    async def _may_be_deposed(self) -> bool:
        if self.is_deposed is None:
            return False
        try:
            return await asyncio.to_thread(self.is_deposed)
        except OSError:
            return False  # the head can't claim an attempt there, either

    async def _reap_head(self) -> None:
        """Wait until nothing is left of the head's agent: only then may another one start."""
        self.engine.kill_head()
        until = time.monotonic() + _END_LIMIT_S
        while self.engine.holds(self.engine.head_place) or self.engine.has_orphans():
            self.engine.poll()
            if time.monotonic() > until:
                raise MusterError("what the head's agent has started could not be ended")
            await asyncio.sleep(_POLL_S)

    async def _start_in_thread(self, start: Callable[..., None]) -> None:
        """Start agents in a thread: a host may take ten seconds to answer, Ctrl-C must not wait."""
        attempt, spent = self._next_attempt, self._policy.lives.spent
        work = asyncio.to_thread(start, first_attempt=attempt, restarts_spent=spent)
        starting = asyncio.create_task(work)
        while not (await asyncio.wait({starting}, timeout=_STOP_LOOK_S))[0]:
            if self._stops.count:
                self.engine.kill_all()
        error = starting.exception()
        if error is not None and not isinstance(error, MusterError):
            raise error
        if error is not None and self._stops.count:
            self.result = self._stopped_result()
        elif error is not None:
            at = self.engine.plan.node_name(self.engine.head_place)
            report = replace(report_of_error(error), at=at)
            self.result = self._own_result(RunState.FAILED, error.exit_code, report)

    def _head_lost(self, ended: str) -> Result:
        name = self.engine.plan.node_name(self.engine.head_place)
        log = self.engine.run_dir.agent_log(name)
        report = Report(
            error=f"the head's agent ended ({ended}), and the head with it",
            at=name_on(name, os.environ.get(MACHINE_VARIABLE, "")),  # in a pod, the owner is inside
            because=tuple(last_lines(log, 20)) or ("it said nothing",),
            hint=f"its log is {log}",
        )
        return self._own_result(RunState.FAILED, 7, report)

    def _stopped_result(self) -> Result:
        cause, signum = self._stops.cause, self._stops.signum
        ended = end_by_stop(cause, signum, self.engine.plan.again, saved=False, lost={})
        return self._own_result(*ended)

    def _own_result(self, state: RunState, code: int, report: Report) -> Result:
        result = Result(
            run_id=self.engine.plan.run_id,
            state=state,
            exit_code=code,
            attempts=self._next_attempt,
            restarts_spent=self._policy.lives.spent,
            elapsed_s=round(recorded_seconds(self.engine.run_dir.events, until=time.time()), 3),
            report=report,
        )
        self._record.replace(self.engine.run_dir.result, codec.to_plain(result))
        return result

    # Signals and the keyboard.

    def _take_stop(self) -> None:
        self._head.send_stop()
        if self._stops.count > 2:
            self.engine.kill_all()

    def _judge_stop(self, signum: int) -> StopCause:
        over = self.deadline is not None and self.deadline.is_over()
        cancelled = os.path.exists(self.engine.run_dir.cancelled)
        return cause_of_stop(signum, cancelled=cancelled, time_is_over=over)

    def _send_size(self) -> None:
        """Send the current size of the terminal to the ranks on it."""
        terminal = own_terminal()
        if terminal is not None:
            size = messages.TerminalSize(columns=terminal.columns, rows=terminal.rows)
            self._head.send(size)

    def _act(self, action: owner_policy.OwnerAction) -> None:
        """Carry out a time-related action; orders are repeated to every head."""
        match action:
            case owner_policy.Say(text=text):
                self.display.say(text)
            case owner_policy.TellEnd(ends_at=ends_at):
                self._head.repeat(messages.JobEnds(ends_at=ends_at))
            case owner_policy.Warn():
                self._head.repeat(
                    messages.Forward(signum=int(signal.SIGUSR1), last=parts.LAST_STOP)
                )
            case owner_policy.StopWorkers(at_once=at_once):
                message = messages.Stop(
                    signum=int(signal.SIGTERM),
                    at_once=at_once,
                    cause=StopCause.TIME,
                    time_is_up=self.deadline is not None and self.deadline.limit.goes_on,
                )
                self._head.repeat(message)

    def _handle_user_signal(self, signum: signal.Signals) -> None:
        limit = self.deadline.limit if self.deadline is not None else None
        if signum == signal.SIGUSR1 and limit is not None and limit.goes_on:
            limit.was_up = True  # the site's own `--signal=B:USR1@...`
            self.display.say("received SIGUSR1: workers get it, to save and exit")
            self._act(owner_policy.Warn())
        else:
            self._head.send(messages.Forward(signum=int(signum)))

    def _begin_input(self) -> None:
        if self._input is None:
            self._input = parts.StandardInput(self._send_input, lambda: self._head.unsent_bytes)
        self._input.begin()

    def _send_input(self, data: bytes) -> None:
        if self.engine.plan.stdin_rank is not None:
            text = data.decode(errors="surrogateescape")
            message = messages.Input(rank=self.engine.plan.stdin_rank, text=text, end=not data)
            self._head.send(message)

    # The end.

    async def _end_agents(self) -> None:
        """Wait for the agents to leave by themselves, then kill the rest."""
        kill_after_s = 3.0 if self._stops.count < 2 else 1.0
        if self.engine.plan.node_setup.stages and self._stops.count < 2:
            kill_after_s = _REMOVE_LIMIT_S  # removing staged data takes time
        await self._reap_all(kill_after_s)
        self.engine.cut_lifeline()

    async def _reap_all(self, kill_after_s: float) -> None:
        started = time.monotonic()
        killed = False
        while time.monotonic() - started < kill_after_s + _END_LIMIT_S:
            self.engine.poll()
            if not self.engine.pids and not self.engine.has_orphans():
                return
            if time.monotonic() - started > _LEAVE_S:
                self.engine.cut_lifeline()  # an agent that had not joined was never told to leave
            if not killed and time.monotonic() - started > kill_after_s:
                self.engine.kill_all()
                killed = True
            await asyncio.sleep(_POLL_S)
        raise MusterError(
            "some processes of the run could not be ended",
            where=", ".join(str(pid) for pid in self.engine.pids),
        )

    def _write_head(self) -> None:
        """Write where the head listens, for other clients."""
        host, port = self.engine.address
        # A client on another machine, such as a login node, tries them all.
        others = {"addresses": list(self.engine.addresses), "node": os.uname().nodename}
        head = {"host": host, "port": port, **(others if self.engine.addresses else {})}
        self._record.replace(self.engine.run_dir.head, head, mode=0o600)
