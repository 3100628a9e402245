"""A courier's part for workflows: it starts the agents of tasks that come to this host.

Such an agent calls the head of its group, which is a process of the client's machine, at a port of the loopback here;
the bytes travel inside the session. A training task on several hosts orders the agents of its other hosts at a desk here
(`net/orders.py`), which passes the order to the client, and the client to the courier of the other host.
"""

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files.layout import RunDir
from torchmuster.net import frames, listener
from torchmuster.net.address import own_addresses
from torchmuster.net.frames import FIRST_CALL_BACK, FrameWriter, Kind
from torchmuster.net.orders import GONE, OrderDesk, StartOrder
from torchmuster.node.remote import files as courier_files
from torchmuster.node.remote.proxy import DESK_VARIABLE, HOST_VARIABLE
from torchmuster.node.shell import NodeShell

_LEAVE_S = 5.0
_POLL_S = 0.05
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
_OPTIONS = {"task": ("group", "task", "attempt"), "node": ("run_dir", "place", "head")}

CarryCall = Callable[[int, socket.socket], None]


class CourierTasks:
    """The tasks of one workflow on one host.

    Args:
        root: The folder that holds torchmuster.
        environment: What agents get before the site's own lines.
        carry: Takes over a call to a head: passes its bytes both ways under a number.
    """

    def __init__(
        self, root: str, writer: FrameWriter, environment: Mapping[str, str], carry: CarryCall
    ) -> None:
        self._root = root
        self._writer = writer
        self._environment = dict(environment)
        self._carry = carry
        self._run_dir: RunDir | None = None
        self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._lock = threading.Lock()  # over starts and ends: what is just starting is no orphan
        self._agents: dict[int, proc.Child] = {}
        self._ports: dict[int, int] = {}
        self._num_calls = 0
        self._orders: dict[int, StartOrder] = {}
        self._num_orders = 0
        self._desk = OrderDesk(self._take_order, self._withdraw_order)

    # The workflow.

    def set_up(self, value: Mapping[str, Any]) -> None:
        """Look whether this host sees the run, do the site's setup lines, and answer; in a thread of its own."""
        threading.Thread(target=self._set_up, args=(value,), daemon=True).start()

    def _set_up(self, value: Mapping[str, Any]) -> None:
        try:
            lacks = _what_is_not_seen(value)
            if not lacks:
                self._run_dir = RunDir(value["run_dir"])
                self._environment[DESK_VARIABLE] = self._desk.name
                self._environment[HOST_VARIABLE] = value["host"]
                self._do_setup(value)
            self._writer.send(frames.pack_json(Kind.PLACED, {"lacks": lacks}))
        except MusterError as error:
            said = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
            self._writer.send(frames.pack_json(Kind.FAIL, said))

    def _do_setup(self, value: Mapping[str, Any]) -> None:
        own = {str(name): str(text) for name, text in value["environment"]}
        self._environment.update(own)
        if not value["lines"]:
            return
        shell = NodeShell(value["host"], lambda _: None, lambda _: None)
        lines = tuple(value["lines"])
        running = shell.run_lines(lines, self._environment, own, value["origin"])
        self._environment = asyncio.run(running).environment

    # Agents.

    def spawn(self, value: Mapping[str, Any]) -> None:
        """Start an agent; GONE is the answer, at its end."""
        number = int(value["id"])
        try:
            argv, environment = self._agent(value)
            with self._lock:
                fd = self._lifeline[0]
                child = proc.start(
                    [*argv, f"--lifeline-fd={fd}"], env=environment, cwd="/", pass_fds=[fd]
                )
                self._agents[number] = child
        except (MusterError, OSError, ValueError, KeyError, TypeError) as error:
            self._tell_gone(number, GONE, f"an agent can't be started there: {error}")
            return
        threading.Thread(target=self._watch, args=(number, child), daemon=True).start()

    def _agent(self, value: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        options, kind = value["options"], value["kind"]
        if set(options) != set(_OPTIONS[kind]):
            raise ValueError("these are not the options of an agent")
        argv = proc.node_program("group" if kind == "task" else "agent")
        argv += self._task_words(value) if kind == "task" else self._node_words(options)
        environment = dict(self._environment)
        if value.get("gpus") is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in value["gpus"])
        return argv, environment

    def _task_words(self, value: Mapping[str, Any]) -> list[str]:
        options = value["options"]
        for name in ("group", "task"):
            if not _NAME.fullmatch(options[name]):
                raise ValueError(f"`{options[name]}` is no name")
        words = [f"--run-dir={self._path()}", f"--head=127.0.0.1:{self._port(int(value['port']))}"]
        words += [f"--group={options['group']}", f"--task={options['task']}"]
        return [*words, f"--attempt={int(options['attempt'])}", f"--address={_own_address()}"]

    def _node_words(self, options: Mapping[str, Any]) -> list[str]:
        run_dir = RunDir(os.path.realpath(options["run_dir"]))
        inside = os.path.realpath(self._path())
        if os.path.commonpath([run_dir.path, inside]) != inside:
            raise ValueError(f"{run_dir.path} is not of this workflow")
        if not re.fullmatch(r"[0-9a-zA-Z.:,]{1,4096}", options["head"]):
            raise ValueError("these are not addresses")
        words = [f"--run-dir={options['run_dir']}", f"--place={int(options['place'])}"]
        path = RunDir(options["run_dir"]).environment
        return [*words, f"--head={options['head']}", f"--environment={path}"]

    def _path(self) -> str:
        if self._run_dir is None:
            raise ValueError("the workflow has not come yet")
        return self._run_dir.path

    def _watch(self, number: int, child: proc.Child) -> None:
        """Wait for an agent's end, end what it left, then tell."""
        status: int | None = None
        while status is None:
            status = child.wait(3600.0)
        with self._lock:
            self._agents.pop(number, None)
        deadline = time.monotonic() + _LEAVE_S
        while self._end_orphans() and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        self._tell_gone(number, status, None)

    def _end_orphans(self) -> bool:
        with self._lock:
            return proc.end_children(frozenset(child.pid for child in self._agents.values()))

    def _tell_gone(self, number: int, status: int, why: str | None) -> None:
        value = {"id": number, "status": status, "why": why}
        self._writer.send(frames.pack_json(Kind.GONE, value))

    def withdraw(self, value: Mapping[str, Any]) -> None:
        """SIGKILL an agent; its watcher ends what it started."""
        with self._lock:
            child = self._agents.get(int(value["id"]))
            if child is not None:
                child.send_signal(9)

    # Calls of agents to their head.

    def _port(self, head_port: int) -> int:
        """Return the port here whose calls come out at the head's port on the client's machine."""
        if head_port not in self._ports:
            listening = listener.bind("127.0.0.1", 0)
            listening.setblocking(True)
            self._ports[head_port] = int(listening.getsockname()[1])
            args = (listening, head_port)
            threading.Thread(target=self._accept, args=args, daemon=True).start()
        return self._ports[head_port]

    def _accept(self, listening: socket.socket, head_port: int) -> None:
        while True:
            call, _ = listening.accept()
            with self._lock:
                self._num_calls += 1
                number = FIRST_CALL_BACK + self._num_calls
            value = {"number": number, "port": head_port}
            self._writer.send(frames.pack_json(Kind.CALL_OPEN, value))
            self._carry(number, call)

    # Orders of processes here.

    def _take_order(self, order: StartOrder) -> None:
        with self._lock:
            self._num_orders += 1
            number = self._num_orders
            self._orders[number] = order
        value = {"id": number, "request": order.request}
        self._writer.send(frames.pack_json(Kind.ASK, value))

    def _withdraw_order(self, order: StartOrder) -> None:
        with self._lock:
            numbers = [number for number, one in self._orders.items() if one is order]
            for number in numbers:
                del self._orders[number]
        for number in numbers:
            self._writer.send(frames.pack_json(Kind.UNASK, {"id": number}))

    def answer(self, value: Mapping[str, Any]) -> None:
        """Tell who ordered an agent elsewhere how it ended."""
        with self._lock:
            order = self._orders.pop(int(value["id"]), None)
        if order is not None:
            order.end(int(value["status"]), value.get("why"))

    # The end.

    def leave(self) -> None:
        """Let the agents end themselves for a moment; the courier kills what is left."""
        self._desk.close()
        with self._lock:
            for fd in self._lifeline:
                os.close(fd)
        deadline = time.monotonic() + _LEAVE_S
        while self._agents and time.monotonic() < deadline:
            threading.Event().wait(_POLL_S)


def _what_is_not_seen(value: Mapping[str, Any]) -> list[str]:
    """Return which folders this host lacks, or can't write to."""
    run_dir = RunDir(value["run_dir"])
    token = os.path.join(run_dir.path, courier_files.TOKEN_FILE)
    if not value["may_share"] or not courier_files.sees(token, value["token"]):
        return [run_dir.path]
    if not os.access(run_dir.path, os.W_OK) or not os.access(run_dir.secret, os.R_OK):
        return [run_dir.path]
    return [folder for folder in value["folders"] if not os.path.isdir(folder)]


def _own_address() -> str:
    """Return where other hosts reach this one: the address that the client called, unless that was a tunnel's."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    called = words[2] if len(words) == 4 else ""
    if called and ":" not in called and not called.startswith("127."):
        return called
    return next(iter(own_addresses()), "127.0.0.1")
