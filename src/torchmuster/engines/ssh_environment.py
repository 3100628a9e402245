"""Brings a virtual environment to the hosts of a run: once from here, then from host to host while it comes.

So the client's link carries it once, however many hosts there are. A host that the one before can't reach, or that had to wait for one that is gone,
gets it from here.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from torchmuster.engines.ssh_command import HostProblem
from torchmuster.engines.ssh_host import HostError, RemoteHost, in_parallel
from torchmuster.files.environment import PackedEnvironment
from torchmuster.model.display.text import few_of, show_size
from torchmuster.net import remote_messages as messages
from torchmuster.node.remote.files import send_pieces

_SAY_EVERY_S = 5.0


class _Counting:
    """A host whose pieces are counted."""

    def __init__(self, host: RemoteHost, shipping: "Shipping") -> None:
        self._host, self._shipping = host, shipping

    def send(self, message: messages.RemoteMessage, *, bulk: bool = False) -> bool:
        """Send a message."""
        if isinstance(message, messages.FilePiece):
            self._shipping.note_sent(message.offset + len(message.data))
        return self._host.send(message, bulk=bulk)


class Shipping:
    """One environment on its way to hosts.

    Args:
        packed: What travels.
        say: Prints a sentence for the user.
    """

    def __init__(self, packed: PackedEnvironment, say: Callable[[str], None]) -> None:
        self._packed, self._say = packed, say
        self._secret = secrets.token_hex(32)
        self._after: dict[RemoteHost, RemoteHost] = {}
        self._there: set[RemoteHost] = set()
        self._lock = threading.Lock()
        self._sent = 0

    def bring(self, hosts: Sequence[RemoteHost]) -> list[HostProblem]:
        """Return when all hosts have it, but for those whose problems are returned."""
        wanted = [host for host in hosts if host not in self._there and host.is_usable]
        if not wanted:
            return []
        answers = in_parallel(self._offer, list(enumerate(wanted)))
        problems = [answer for answer in answers if isinstance(answer, HostProblem)]
        if problems:  # which of them can't have it is said before anything is sent
            return problems
        lacking: list[tuple[RemoteHost, messages.EnvironmentPlaced]] = []
        for host, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, messages.EnvironmentPlaced) and not answer.has:
                lacking.append((host, answer))
        self._there.update(host for host in wanted if host not in [one for one, _ in lacking])
        if not lacking:
            return []
        began = time.monotonic()
        for (host, _), (after, place) in itertools.pairwise(lacking):
            with self._lock:
                self._after[host] = after
            host.send(messages.PassEnvironment(addresses=place.addresses, port=place.port))
        sending = threading.Thread(target=self._send, args=(lacking[0][0],), daemon=True)
        sending.start()
        is_over = threading.Event()
        names = [host.host.name for host, _ in lacking]
        threading.Thread(target=self._tell, args=(names, is_over), daemon=True).start()
        try:
            ends = in_parallel(self._wait, [host for host, _ in lacking])
        finally:
            is_over.set()
        problems = [end for end in ends if end is not None]
        came = len(lacking) - len(problems)
        if came:
            size = show_size(self._packed.needs.size_bytes)
            number = f"{came} host{'s' if came != 1 else ''}"
            took_s = time.monotonic() - began
            self._say(f"the environment ({size}) has come to {number} in {took_s:.1f} s")
        return problems

    def _offer(self, numbered: tuple[int, RemoteHost]) -> messages.EnvironmentPlaced | HostProblem:
        number, host = numbered
        offer = messages.OfferEnvironment(
            needs=self._packed.needs, secret=self._secret, tries=number == 0
        )
        try:
            return host.ask(offer, messages.EnvironmentPlaced)
        except HostError as error:
            return error.problem

    def _send(self, host: RemoteHost) -> None:
        send_pieces(_Counting(host, self), self._packed.path, messages.ENVIRONMENT_FILE)

    def note_sent(self, num_bytes: int) -> None:
        """Note how far the first host is."""
        self._sent = num_bytes

    def _tell(self, names: Sequence[str], is_over: threading.Event) -> None:
        """Say every few seconds what is waited for."""
        size = self._packed.needs.size_bytes
        while not is_over.wait(_SAY_EVERY_S):
            with self._lock:
                there = {host.host.name for host in self._there}
            missing = few_of([name for name in names if name not in there], 8)
            how = f"{show_size(self._sent)} of {show_size(size)} are sent"
            if self._sent >= size:
                how = "all is sent and is being unpacked"
            self._say(f"the environment comes to {missing}: {how}")

    def _wait(self, host: RemoteHost) -> HostProblem | None:
        try:
            done = host.expect(messages.EnvironmentDone)
        except HostError as error:
            self.take_failed_hop(host, "it is lost")
            return error.problem
        if done.why is not None:
            host.abandon()
            return HostProblem(host=host.host.name, words=done.why, fix="")
        with self._lock:
            self._there.add(host)
        return None

    def take_failed_hop(self, host: RemoteHost, why: str) -> None:
        """Send from here what a host could not bring to the next one."""
        with self._lock:
            after = self._after.pop(host, None)
        if after is None or after in self._there or not after.is_usable:
            return
        names = host.host.name, after.host.name
        self._say(f"{names[1]} gets the environment from here: not from {names[0]} ({why})")
        threading.Thread(target=self._send, args=(after,), daemon=True).start()
