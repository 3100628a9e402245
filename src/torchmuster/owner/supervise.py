"""The owner of a run on this machine: starts the agents, follows the head, mends what it can.

`muster run` is this process; with `--detach` a process in the background takes its place. When it dies the
run ends: the agents see the end of their lifeline.
"""

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster import proc
from torchmuster.engines.local import HEAD
from torchmuster.engines.starter import describe_end
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.files.tail import last_lines
from torchmuster.files.terminal import own_terminal
from torchmuster.model import codec
from torchmuster.model.contract import describe_exit
from torchmuster.model.display.text import report_of_error
from torchmuster.model.lease import OwnClock
from torchmuster.model.plan import RunPlan
from torchmuster.model.states import RunState
from torchmuster.model.stop import StopCause, cause_of_stop, end_by_stop
from torchmuster.model.verdict import Report, Result
from torchmuster.net import messages
from torchmuster.net.channel import Channel, ChannelClosedError, connect
from torchmuster.net.handshake import HandshakeError, Role
from torchmuster.net.secret import read_secret
from torchmuster.node.leftovers import sweep_beside
from torchmuster.owner.deadline import LAST_STOP, Deadline
from torchmuster.owner.head_watch import HeadWatch
from torchmuster.owner.parts import Engine, RunDisplay, StandardInput
from torchmuster.owner.session import hangup_ignored
from torchmuster.owner.views.record import read_events, read_result

_POLL_S = 0.01
_WATCH_S = 0.2
_LOOK_EVERY_S = 1.0
_SWEEP_LIMIT_S = 5.0  # a folder of staged data takes longer: the next run goes on with it
_END_LIMIT_S = 12.0  # from the kill
_LEAVE_S = 1.0
_STOP_LOOK_S = 0.3
_REMOVE_LIMIT_S = 120.0


@dataclass(slots=True)
class _Progress:
    """What must survive the head: the attempt counter and the restarts."""

    next_attempt: int = 0
    restarts_spent: int = 0
    heads_lost: int = 0


@dataclass(slots=True)
class Supervisor:
    """Owns one run.

    Attributes:
        deadline: The end of the job's time; None where there is no job.
    """

    plan: RunPlan
    run_dir: RunDir
    engine: Engine
    display: RunDisplay
    deadline: Deadline | None = None
    forward_stdin: bool = False
    result: Result | None = None
    _progress: _Progress = field(default_factory=_Progress)
    _channel: Channel | None = None
    _stops: int = 0
    _stop_signum: int = 0
    _is_deaf_to_sigint: bool = False
    _head_end: int | None = None
    _given_up: str | None = None
    _input: StandardInput | None = None
    _said_of_time: list[messages.Message] = field(default_factory=list)
    _wanted: set[int] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _watch: HeadWatch = field(init=False)
    _notes: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        node, grace_s = self.plan.node_name(HEAD), self.plan.limits.grace_s
        self._watch = HeadWatch(OwnClock(), node, grace_s)

    async def run(self) -> Result:
        """Follow the run to its end; the agents have been started already."""
        loop = asyncio.get_running_loop()
        self._is_deaf_to_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum == signal.SIGHUP and hangup_ignored():
                continue
            loop.add_signal_handler(signum, self._take_stop, signum)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(signum, self._take_user_signal, signum)
        loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        loop.add_signal_handler(signal.SIGWINCH, self._send_size)
        watching = self._watch_the_time()
        try:
            while self.result is None:
                noting = asyncio.create_task(asyncio.to_thread(self._write_head))
                self._notes.add(noting)  # a hung disk must not keep us from following
                noting.add_done_callback(self._notes.discard)
                await self._live_with_head()
                if self.result is None:
                    await self._replace_head()
        finally:
            if watching is not None:
                watching.cancel()
            await self._end_agents()
            # What killed agents of this machine have left: there may be no other run to remove it.
            await asyncio.to_thread(sweep_beside(None).join, _SWEEP_LIMIT_S)
        return self.result

    # One head's life.

    async def _live_with_head(self) -> None:
        """Follow the head until it has a result or its agent has ended."""
        self._head_end, self._given_up = None, None
        self._watch.begin()
        following = asyncio.create_task(self._follow())
        watching = asyncio.create_task(self._watch_agents())
        looking = asyncio.create_task(self._look_at_head())
        tasks = {following, watching, looking}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if watching in done and self.result is None:
            # What the head said last may still be on its way to us.
            await asyncio.wait({following}, timeout=1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _look_at_head(self) -> None:
        """Ping the head; end it when it stands still, or does not end when it is asked to."""
        while self._given_up is None:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self._channel is not None:
                self._channel.send_nowait(messages.Ping(number=0))
            look = self._watch.look(self.engine.head_state)
            if look.say is not None:
                self.display.say(look.say)
            self._given_up = look.given_up
        self.engine.kill_all()

    async def _follow(self) -> None:
        """Take what the head says; call again when the connection ends and the head does not."""
        told = 0
        while self.result is None:
            channel = await self._connect()
            self._channel = channel
            channel.send_nowait(messages.Watch(owner=True))
            if self._stops:
                self._send_stop()
            for message in self._said_of_time[told:]:
                channel.send_nowait(message)
            try:
                while self.result is None:
                    self._take(await channel.receive())
            except ChannelClosedError:
                told = len(self._said_of_time)
            finally:
                self._channel = None
                channel.abort()

    async def _connect(self) -> Channel:
        """Call the head until it answers; `_look_at_head` and `_watch_agents` set the limit."""
        secret = read_secret(self.run_dir.secret)
        host, port = self.engine.address
        while True:
            try:
                return await connect(host, port, Role.CLIENT, secret)
            except (OSError, TimeoutError, HandshakeError):
                await asyncio.sleep(_POLL_S)

    async def _watch_agents(self) -> None:
        while True:
            for end in self.engine.poll():
                if end.place == HEAD:
                    self._head_end = end.status
                elif end.said and self._channel is not None:
                    why = describe_end(end.status, end.said)
                    self._channel.send_nowait(messages.StartFailed(place=end.place, why=why))
            if self._head_end is not None:
                return
            self._fill_places()
            self._changed.clear()
            try:
                async with asyncio.timeout(_WATCH_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _fill_places(self) -> None:
        for place in sorted(self._wanted):
            self._wanted.discard(place)
            if place != HEAD:
                self.engine.start_place(place)

    # What the head says.

    def _take(self, message: messages.Message) -> None:
        self._watch.hear()
        match message:
            case messages.Event(name="run_ended", fields=fields):
                self.result = codec.from_plain(Result, fields)
            case messages.Event(name=name, fields=fields):
                self._note_progress(name, fields)
                if name == "left_running":
                    proc.leave_sessions(process["session"] for process in fields["processes"])
                if name == "workers_started":
                    self._send_size()  # it may have changed while there was nobody to tell
                if name == "workers_started" and self.forward_stdin:
                    self._begin_input()  # not before: there is nobody yet to get it
                self.display.tell(name, fields)
            case messages.Output():
                self.display.show(message.rank, message.stream, message.text, message.dropped_lines)
            case messages.NeedNodes(places=places, again=again):
                self._wanted.update(p for p in places if not (again and self.engine.holds(p)))
                self._changed.set()

    def _note_progress(self, name: str, fields: dict[str, Any]) -> None:
        if name == "attempt_started":
            self._progress.next_attempt = fields["attempt"] + 1
        if name == "attempt_failed" and fields["restarts_left"] is not None:
            left = fields["restarts_left"]
            self._progress.restarts_spent = self.plan.limits.max_restarts - left

    # The head's loss.

    async def _replace_head(self) -> None:
        """The head has gone: end everything, then begin again where the record stops."""
        end = self._head_end
        ended = self._given_up or ("it never answered" if end is None else describe_exit(end))
        self.engine.cut_lifeline()
        await self._reap_all(kill_after_s=3.0)
        self.result = read_result(self.run_dir)
        if self.result is not None:  # it had ended well; its last words did not reach us
            return
        self._read_record()
        if self._stops:
            self.result = self._stopped_result()
            return
        if self._progress.next_attempt > 0 or self._progress.heads_lost > 0:
            # The first head may fall before the first attempt for nothing; what follows is counted.
            if self._progress.restarts_spent >= self.plan.limits.max_restarts:
                self.result = self._head_lost(ended)
                return
            self._progress.restarts_spent += 1
        self._progress.heads_lost += 1
        self.display.say(
            f"the head's agent ended ({ended}): all nodes are started again with attempt"
            f" {self._progress.next_attempt}"
        )
        await self._start_all_again()

    async def _start_all_again(self) -> None:
        """Start all agents beside the loop: a host may take ten seconds to answer, a Ctrl-C none."""
        starting = asyncio.create_task(
            asyncio.to_thread(
                self.engine.start_all,
                first_attempt=self._progress.next_attempt,
                restarts_spent=self._progress.restarts_spent,
            )
        )
        while not (await asyncio.wait({starting}, timeout=_STOP_LOOK_S))[0]:
            if self._stops:
                self.engine.kill_all()
        error = starting.exception()
        if error is not None and not isinstance(error, MusterError):
            raise error
        if error is not None and self._stops:
            self.result = self._stopped_result()
        elif error is not None:
            report = replace(report_of_error(error), at=self.plan.node_name(HEAD))
            self.result = self._own_result(RunState.FAILED, error.exit_code, error.what, report)

    def _read_record(self) -> None:
        """Take the attempt counter from the record too: the last words may not have reached us."""
        for event in read_events(self.run_dir.events):
            if event.get("event") == "attempt_started":
                following = int(event["attempt"]) + 1
                self._progress.next_attempt = max(self._progress.next_attempt, following)
        try:
            names = os.listdir(self.run_dir.logs)
        except OSError:
            return
        for name in names:
            number = name.removeprefix("attempt-")
            if number.isdigit():
                following = int(number) + 1
                self._progress.next_attempt = max(self._progress.next_attempt, following)

    def _head_lost(self, ended: str) -> Result:
        log = self.run_dir.agent_log(self.plan.node_name(HEAD))
        report = Report(
            error=f"the head's agent ended ({ended}), and the head with it",
            at=self.plan.node_name(HEAD),
            because=tuple(last_lines(log, 20)) or ("it said nothing",),
            hint=f"its log is {log}",
        )
        return self._own_result(RunState.FAILED, 7, report.error, report)

    def _stopped_result(self) -> Result:
        cause, signum = self._stop_cause(), self._stop_signum
        state, code, report = end_by_stop(cause, signum, self.plan.run_id, saved=False, lost={})
        return self._own_result(state, code, report.error, report)

    def _own_result(
        self, state: RunState, code: int, error: str, report: Report | None = None
    ) -> Result:
        result = Result(
            run_id=self.plan.run_id,
            state=state,
            exit_code=code,
            attempts=self._progress.next_attempt,
            restarts_spent=self._progress.restarts_spent,
            elapsed_s=0.0,
            report=report or Report(error=error),
        )
        try:
            atomic.write_json(self.run_dir.result, codec.to_plain(result))
        except OSError as error_now:
            self.display.say(f"the result could not be written: {error_now.strerror}")
        return result

    # Signals and the keyboard.

    def _take_stop(self, signum: signal.Signals) -> None:
        self._stops += 1
        self._stop_signum = int(signum)
        self._watch.stop()
        self._send_stop()

    def _send_stop(self) -> None:
        at_once = self._stops > 1
        signum, cause = self._stop_signum, self._stop_cause()
        if self._is_deaf_to_sigint and signum == signal.SIGINT:
            signum = int(
                signal.SIGTERM
            )  # a background job of a shell: its workers ignore SIGINT, too
        if self._channel is not None:
            self._channel.send_nowait(messages.Stop(signum=signum, at_once=at_once, cause=cause))
        if self._stops > 2:
            self.engine.kill_all()

    def _stop_cause(self) -> StopCause:
        over = self.deadline is not None and self.deadline.is_over()
        cancelled = os.path.exists(self.run_dir.cancelled)
        return cause_of_stop(self._stop_signum, cancelled=cancelled, time_is_over=over)

    def _send_size(self) -> None:
        """Tell the ranks that are shown how large the terminal is now."""
        terminal = own_terminal()
        if terminal is not None and self._channel is not None:
            size = messages.TerminalSize(columns=terminal.columns, rows=terminal.rows)
            self._channel.send_nowait(size)

    def _watch_the_time(self) -> asyncio.Task[None] | None:
        if self.deadline is None:
            return None
        watching = self.deadline.watch(self.display.say, self._warn_of_the_end, self._end_in_time)
        return asyncio.create_task(watching)

    def _warn_of_the_end(self) -> None:
        self._say_of_time(messages.Forward(signum=int(signal.SIGUSR1), last=LAST_STOP))

    def _end_in_time(self, at_once: bool) -> None:
        message = messages.Stop(
            signum=int(signal.SIGTERM), at_once=at_once, cause=StopCause.TIME, time_is_up=True
        )
        self._say_of_time(message)

    def _say_of_time(self, message: messages.Message) -> None:
        """Tell the head, and each one that takes its place."""
        self._said_of_time.append(message)
        if self._channel is not None:
            self._channel.send_nowait(message)

    def _take_user_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGUSR1 and self.deadline is not None and self.deadline.goes_on:
            self.deadline.was_up = True  # the site's own `--signal=B:USR1@...`
            self.display.say("received SIGUSR1: workers get it, to save and exit")
            self._warn_of_the_end()
        elif self._channel is not None:
            self._channel.send_nowait(messages.Forward(signum=int(signum)))

    def _begin_input(self) -> None:
        if self._input is None:
            unsent = lambda: self._channel.unsent_bytes if self._channel is not None else 0  # noqa: E731
            self._input = StandardInput(self._send_input, unsent)
        self._input.begin()

    def _send_input(self, data: bytes) -> None:
        if self._channel is not None and self.plan.stdin_rank is not None:
            text = data.decode(errors="surrogateescape")
            message = messages.Input(rank=self.plan.stdin_rank, text=text, end=not data)
            self._channel.send_nowait(message)

    # The end.

    async def _end_agents(self) -> None:
        """Wait for the agents to leave by themselves, then make sure."""
        kill_after_s = 3.0 if self._stops < 2 else 1.0
        if self.plan.node_setup.stages and self._stops < 2:
            kill_after_s = _REMOVE_LIMIT_S  # what was staged is removed now, which takes its time
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
                self.engine.cut_lifeline()  # an agent that had not joined yet heard no goodbye
            if not killed and time.monotonic() - started > kill_after_s:
                self.engine.kill_all()
                killed = True
            await asyncio.sleep(_POLL_S)
        raise MusterError(
            "some processes of the run could not be ended",
            where=", ".join(str(pid) for pid in self.engine.pids),
        )

    def _write_head(self) -> None:
        """Tell other clients where the head listens."""
        host, port = self.engine.address
        try:
            # A client on another machine, such as a login node, tries all of them.
            others = {"addresses": list(self.engine.addresses), "node": os.uname().nodename}
            head = {"host": host, "port": port, **(others if self.engine.addresses else {})}
            atomic.write_json(self.run_dir.head, head, mode=0o600)
        except OSError as error:
            self.display.say(
                f"`muster cancel` will not find this run: {self.run_dir.head}: {error.strerror}"
            )
