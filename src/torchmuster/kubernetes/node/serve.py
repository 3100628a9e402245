"""The first process of a pod: its pod server, and the commands that callers run there.

    pod --key FILE --order FILE

Clients that authenticate with the run's key can run commands here. In the first pod this process
also starts the run's owner, restarts it if it is killed, and ends with it. It passes SIGTERM on to
what runs here: the node is drained, or the Job deleted. Orphaned processes become its children, and
it reaps them.

Each command has a separate authenticated channel (`launcher/node/exec.py`,
`launcher/net/command.py`). When the connection ends, so does the command's input: a remote
(`launcher/node/remote`) then ends what it has started.

The owner of a run names its first pod with each command. Of two first pods, the later one has the
run: sessions of the earlier one end, and its next call is answered with that news. A node that only
seemed dead may come back with its pod after an hour.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model.codec import from_arguments, to_arguments
from torchmuster.core.model.contract import CREDENTIALS_VARIABLE, OVERUSED_SIGNAL
from torchmuster.core.model.failure import OVERUSED
from torchmuster.core.net.address import bind, read_secret
from torchmuster.core.net.channel import Channel, ChannelClosedError, HandshakeError, Role
from torchmuster.core.net.listener import Listener
from torchmuster.errors import MusterError
from torchmuster.kubernetes.node.order import (
    AGAIN_CODE,
    CREDENTIALS_FILE,
    DISK_BYTES_VARIABLE,
    FINAL_CODE,
    INDEX_VARIABLE,
    KEY_VARIABLE,
    MEMORY_BYTES_VARIABLE,
    ORDER_VARIABLE,
    PROGRAMS_VARIABLE,
    READS_VARIABLE,
    REPLACED_CODE,
    PodOrder,
    PodWords,
    own_index,
    place_member,
    read_order,
)
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node.exec import Exec, kill_sessions

# Whether a pod that is asked to end is evicted for its own use of disk or memory.
#
# An evicting kubelet sends SIGTERM as for any other end, with one second of grace, and tells only
# the API why. Source: kubernetes pkg/kubelet/eviction: a disk by its `sizeLimit`; memory if the
# node is short of it, starting with pods that use more than they request.


_COUNT_S = 0.5
_BLOCK_BYTES = 512
_SHORT_BYTES, _SHORT_SHARE = 512 << 20, 0.05  # of a node's memory; a kubelet has its own


def is_overused(environment: Mapping[str, str], root: str = "/") -> bool:
    """Say whether this pod uses more than its share; `root` is the parent of /proc and /sys."""
    return _disk_is(environment) or _memory_is(environment, root)


def _disk_is(environment: Mapping[str, str]) -> bool:
    limit, disk = environment.get(DISK_BYTES_VARIABLE, ""), environment.get("MUSTER_POD_DISK")
    if not limit.isdecimal() or disk is None:
        return False
    until, used_bytes = time.monotonic() + _COUNT_S, 0
    for folder, _, names in os.walk(disk):
        for name in names:
            with contextlib.suppress(OSError):
                used_bytes += os.lstat(os.path.join(folder, name)).st_blocks * _BLOCK_BYTES
        if used_bytes > int(limit) or time.monotonic() > until:
            break
    return used_bytes > int(limit)


def _memory_is(environment: Mapping[str, str], root: str) -> bool:
    asked = environment.get(MEMORY_BYTES_VARIABLE, "")
    try:
        node = _numbers(f"{root}/proc/meminfo", 1024)
        used_bytes = _numbers(f"{root}/sys/fs/cgroup/memory.stat", 1)
        with open(f"{root}/sys/fs/cgroup/memory.current") as file:
            own_bytes = int(file.read()) - used_bytes["inactive_file"]
        short_bytes = max(_SHORT_BYTES, _SHORT_SHARE * node["MemTotal:"])
        is_short = node["MemAvailable:"] < short_bytes
    except (OSError, ValueError, KeyError):
        return False
    return asked.isdecimal() and is_short and own_bytes > int(asked)


def _numbers(path: str, unit: int) -> dict[str, int]:
    with open(path) as file:
        fields = (line.split() for line in file)
        return {words[0]: int(words[1]) * unit for words in fields if len(words) > 1}


_REAP_EVERY_S = 1.0
_STOPS = (signal.SIGTERM, signal.SIGINT)
_END_SIGNAL = signal.SIGUSR1  # from the owner of a group
_MOST_OWNERS = 20
_PAUSE_S = 1.0
_LOOK_S = 0.1
_EXIT_DELAY_S = 0.3  # a kubelet gives an evicted pod one second
_TAKE_RECORD_S = 60.0  # after the run's end, while clients read its record
_CALL_AGAIN_S = 5.0  # for a client whose connection has just broken
_RECORD_PROGRAM = "pod-record"
_LEAVE_S = 20.0  # a remote takes up to 10 s to end its agents
_LAST_WORDS_S = 30.0


class Sessions:
    """The commands that callers run here.

    Attributes:
        pids: The pids of the commands; a reaper of orphans must not wait for them.
        num_starting: The number of commands without a known pid yet.
    """

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.num_starting = 0
        self._execs: dict[Exec, tuple[Channel, str]] = {}
        self._claims: list[str] = []
        self._last_read = float("-inf")
        self._passed_on: int | None = None

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Count a process that is being started, whose pid is not known yet."""
        self.num_starting += 1
        try:
            yield
        finally:
            self.num_starting -= 1

    def signal(self, signum: int) -> None:
        """Send a signal to all commands, present and future; remotes pass it on to their agents."""
        self._passed_on = signum
        for pid in self.pids & {one.pid for one in self._execs}:
            proc.kill_quietly(pid, signum)

    async def ended(self, limit_s: float = float("inf"), *, calls_again_s: float = 0.0) -> None:
        """Wait until no command runs, at most so long; a client that read the record may return."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while (now := loop.time()) < deadline:
            is_busy = self._execs or self.num_starting
            if not is_busy and now - self._last_read >= calls_again_s:
                return
            await asyncio.sleep(_LOOK_S)

    async def serve(self, channel: Channel) -> None:
        """Run one caller's command until it or the connection ends."""
        try:
            start = await channel.receive()
        except ChannelClosedError:
            return
        if not isinstance(start, part_messages.ExecStart) or not start.argv:
            return
        if start.claim and not self._admit(start.claim):
            channel.send_nowait(part_messages.ExecEnded(exec_id=start.exec_id, code=REPLACED_CODE))
            await channel.close()
            return
        reads = any(_RECORD_PROGRAM in word for word in start.argv)

        def launch(streams: tuple[int, int, int]) -> proc.Child:
            stdin, stdout, stderr = streams
            return proc.start(start.argv, stdin=stdin, stdout=stdout, stderr=stderr)

        most = part_messages.MAX_WINDOW_BYTES
        one = Exec(
            start,
            channel.send_nowait,
            launch,
            _LEAVE_S,
            gets_hangup=False,
            most_bytes=most,
            patience_s=_LAST_WORDS_S,
        )
        self._execs[one] = channel, start.claim
        hearing = asyncio.create_task(_hear(channel, one))
        try:
            try:
                last = await one.run(None, self._note)
            finally:
                kill_sessions({one.pid} - {0})
                self.pids.discard(one.pid)
            if not one.is_left:
                channel.send_nowait(last)
                await _until_taken(one, hearing)
        finally:
            hearing.cancel()
            del self._execs[one]
            if reads:
                self._last_read = asyncio.get_running_loop().time()

    def _note(self, pid: int) -> None:
        self.pids.add(pid)
        if self._passed_on is not None:
            proc.kill_quietly(pid, self._passed_on)

    def _admit(self, claim: str) -> bool:
        """Say whether a first pod has the run; a new claim ends the sessions of earlier ones."""
        if claim in self._claims[:-1]:
            return False
        if claim not in self._claims:
            self._claims.append(claim)
            for channel, earlier in self._execs.values():
                if earlier and earlier != claim:
                    channel.abort()
        return True


async def _until_taken(one: Exec, hearing: "asyncio.Task[None]") -> None:
    """Wait until the caller hangs up, which it does after reading all output, or stops reading."""
    heard_at = None
    while not hearing.done() and one.heard_at != heard_at:
        heard_at = one.heard_at
        await asyncio.wait({hearing}, timeout=_LAST_WORDS_S)


async def _hear(channel: Channel, one: Exec) -> None:
    """Pass a caller's messages to its command; when the caller is gone, end the command's input."""
    with contextlib.suppress(ChannelClosedError):
        while True:
            message = await channel.receive()
            if isinstance(message, part_messages.FromExecClient):
                one.take(message)
    one.take(part_messages.ExecLeave(exec_id=one.exec_id))


class PodServer:
    """Serves sessions until it is asked to stop, or until the owner of its run has ended.

    Attributes:
        order: The pod's order.
        owner: The command of the run's owner; None in the other pods.
    """

    def __init__(self, secret: bytes, order: PodOrder, owner: list[str] | None) -> None:
        self.order, self.owner = order, owner
        self._sessions = Sessions()
        self._stopping = asyncio.Event()
        self._owner: asyncio.subprocess.Process | None = None
        self._is_deaf = False
        self._is_done = False
        self._refused: set[str] = set()
        listening = bind_in_pod(order.port)
        self._listener = Listener(listening, (secret, None), self._serve, self._refuse)

    async def serve(self) -> int:
        """Serve until the end; return the pod's exit code."""
        loop = asyncio.get_running_loop()
        for signum in _STOPS:
            loop.add_signal_handler(signum, self._stop)
        loop.add_signal_handler(_END_SIGNAL, self._take_end)
        serving = asyncio.create_task(self._listener.serve())
        reaping = asyncio.create_task(self._reap_for_ever())
        print(f"muster: sessions are served at port {self._listener.port}", flush=True)
        try:
            code = await self._own() if self.owner is not None else AGAIN_CODE
            if self.owner is None:
                await self._stopping.wait()
                await self._sessions.ended()
            return 0 if self._is_done else code
        finally:
            # A second signal must not end it before its sessions; the loop restores defaults on
            # closing.
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
            for task in (serving, reaping):
                task.cancel()
            await asyncio.gather(serving, reaping, return_exceptions=True)

    def _take_end(self) -> None:
        """End as a success: the group has ended, and this pod's Job can't see that."""
        self._is_done = True
        self._stop()

    def _stop(self) -> None:
        """Pass SIGTERM on: the owner stops its run, agents report that their node leaves."""
        self._stopping.set()
        if is_overused(os.environ):
            print(f"muster: {OVERUSED}: it is taken away", flush=True)
            self._stop_accepting()
            self._sessions.signal(OVERUSED_SIGNAL)
            asyncio.get_running_loop().call_later(_EXIT_DELAY_S, os._exit, AGAIN_CODE)
            return
        if self._owner is not None and self._owner.returncode is None:
            self._owner.send_signal(signal.SIGTERM)
            return
        self._stop_accepting()
        self._sessions.signal(signal.SIGTERM)

    def _stop_accepting(self) -> None:
        """Accept no more calls: callers of this name now mean the replacement pod."""
        if not self._is_deaf:
            self._is_deaf = True
            self._listener.accept_no_more()

    async def _own(self) -> int:
        """Run the owner, again if it crashed; return the pod's exit code."""
        for _ in range(_MOST_OWNERS):
            code = await self._own_once()
            if code in (0, FINAL_CODE):
                await self._wait_for_client()
                again_s = 0.0 if self._is_held else _CALL_AGAIN_S
                await self._sessions.ended(_TAKE_RECORD_S, calls_again_s=again_s)
            if code in (0, FINAL_CODE, AGAIN_CODE) or self._stopping.is_set():
                return code if code in (0, FINAL_CODE) else AGAIN_CODE
            print(f"muster: the run's owner ended ({code}): it is started again", flush=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._stopping.wait()
        return FINAL_CODE

    async def _wait_for_client(self) -> None:
        """Wait at most `keep_s` until a client holds what only the pods have, or until a stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.order.keep_s):
                while not self._is_held and not self._stopping.is_set():
                    await asyncio.sleep(_LOOK_S)

    @property
    def _is_held(self) -> bool:
        return os.path.exists(self.order.held)

    async def _own_once(self) -> int:
        with self._sessions.starting():
            self._owner = await asyncio.create_subprocess_exec(*(self.owner or ()))
            self._sessions.pids.add(self._owner.pid)
        if self._stopping.is_set():
            self._owner.send_signal(signal.SIGTERM)
        code = await self._owner.wait()
        self._sessions.pids.discard(self._owner.pid)
        return code

    async def _serve(self, channel: Channel) -> None:
        if channel.role is Role.SESSION:
            await self._sessions.serve(channel)

    def _refuse(self, address: str, error: HandshakeError) -> None:
        if address not in self._refused:
            self._refused.add(address)
            sys.stderr.write(f"muster: a caller from {address} was refused: {error}\n")

    async def _reap_for_ever(self) -> None:
        while True:
            self._reap()
            await asyncio.sleep(_REAP_EVERY_S)

    def _reap(self) -> None:
        """Reap orphans, which the kernel gives to the first process of a container."""
        if self._sessions.num_starting:
            return  # if it ended at once, its exit status belongs to its session
        for pid in proc.children_of(os.getpid()):
            facts = proc.read_process(pid)
            if pid not in self._sessions.pids and facts is not None and facts.state == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def bind_in_pod(port: int) -> socket.socket:
    """Return a listening socket of this pod.

    Raises:
        MusterError: The port is not free.
    """
    try:
        return bind("", port)
    except OSError as error:
        raise MusterError(
            f"port {port} of this pod can't be opened",
            why=error.strerror,
            fix="with the host's network another process of the host may have it: `door_port` of the site",
        ) from error


def main(arguments: list[str]) -> int:
    """Serve sessions in this pod; in the first one also own the run."""
    words = from_arguments(PodWords, arguments)
    order, path = read_order(words.order), words.order
    if order.is_sweep and READS_VARIABLE not in os.environ:
        path = place_member(path, os.environ, os.path.join(os.path.dirname(words.key), "member"))
        os.environ[INDEX_VARIABLE] = "0"  # the member's run has only this pod
    owner = None
    if own_index(os.environ) == 0:
        program = "conduct-pods" if order.group is None else "conduct-group-pods"
        owner = proc.node_program(program, *to_arguments(replace(words, order=path)))
    os.environ.update(order.environment)
    _place_credentials(words.key, words.order)
    os.environ[KEY_VARIABLE] = os.path.abspath(words.key)
    os.environ[ORDER_VARIABLE] = os.path.abspath(path)
    os.environ[PROGRAMS_VARIABLE] = shlex.join(proc.node_program("")[:-1])
    proc.become_subreaper()
    own = read_order(path)
    return asyncio.run(_serve(read_secret(words.key), own, owner))


def _place_credentials(key: str, order: str) -> None:
    """Copy the user's credentials next to the key, readable by us only; set their variable."""
    source = os.path.join(os.path.dirname(order), CREDENTIALS_FILE)
    if not os.path.exists(source):
        return
    path = os.path.join(os.path.dirname(key), CREDENTIALS_FILE)
    with open(source, "rb") as file:
        atomic.replace_file(path, file.read(), mode=0o600)
    os.environ[CREDENTIALS_VARIABLE] = path


async def _serve(secret: bytes, order: PodOrder, owner: list[str] | None) -> int:
    return await PodServer(secret, order, owner).serve()
