"""Brings an environment to the hosts of a run: once from here, then from host to host while it comes.

So the client's link carries it once, however many hosts there are. A host that the one before can't reach, or that had to wait for one that is gone,
gets from here what it lacks.
"""

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from torchmuster.engines.ssh_command import HostProblem
from torchmuster.engines.ssh_host import HostError, RemoteHost, in_parallel
from torchmuster.files.environment import PackedEnvironment
from torchmuster.files.parcel import ParcelError, ParcelFile
from torchmuster.model.display.text import few_of, show_size, show_transfer
from torchmuster.net import remote_messages as messages

_SAY_EVERY_S = 5.0
_LIST = -1


class Shipping:
    """One environment on its way to hosts.

    Args:
        pack: Waits for what travels: it is packed while hosts are called.
        say: Prints a sentence for the user.
        scratch: The site's folder for it on each host; None: the host's own.
    """

    def __init__(
        self,
        pack: Callable[[], PackedEnvironment],
        say: Callable[[str], None],
        scratch: str | None = None,
    ) -> None:
        self._pack, self._say, self._scratch = pack, say, scratch
        self._hold = -1
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
        self._take_archive()
        answers = in_parallel(self._offer, wanted)
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
        lacking[-1][0].send(messages.PassEnvironment())
        self._send_from_here(lacking[0][0], tries=True)
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

    def _take_archive(self) -> None:
        """Wait for the archive, the first time, and hold it."""
        with self._lock:
            if self._hold < 0:
                self._packed = self._pack()
                # Open as long as the run lives: `muster prune` can take only its name away.
                self._hold = os.open(self._packed.path, os.O_RDONLY | os.O_CLOEXEC)

    def _offer(self, host: RemoteHost) -> messages.EnvironmentPlaced | HostProblem:
        offer = messages.OfferEnvironment(
            needs=self._packed.needs, secret=self._secret, scratch=self._scratch
        )
        try:
            return host.ask(offer, messages.EnvironmentPlaced)
        except HostError as error:
            return error.problem

    def _send_from_here(self, host: RemoteHost, *, tries: bool = False) -> None:
        threading.Thread(target=self._send, args=(host, tries), daemon=True).start()

    def _send(self, host: RemoteHost, tries: bool) -> None:
        """Send what a host lacks."""
        packed = self._packed
        try:
            with contextlib.closing(
                ParcelFile(f"/proc/self/fd/{self._hold}", packed.needs.sha, packed.needs.num_pieces)
            ) as parcel:
                question = messages.BringEnvironment(tries=tries)
                first = host.ask(question, messages.EnvironmentWants).index
                for index in range(max(first, _LIST), packed.needs.num_pieces):
                    data = parcel.list_bytes if index == _LIST else parcel.piece(index)
                    piece = messages.EnvironmentPiece(index=index, data=data)
                    if not host.send(piece, bulk=True):
                        return
                    self._sent = max(self._sent, parcel.offset(index + 1))
        except HostError:
            return  # who waits for it hears it too
        except (ParcelError, OSError) as error:
            with contextlib.suppress(OSError):
                os.unlink(packed.path)
            words, fix = f"{error}: {packed.path}", "it is removed; type the command again"
            for one in {host, *self._after, *self._after.values()}:
                one.refuse(HostProblem(host=one.host.name, words=words, fix=fix))

    def _tell(self, names: Sequence[str], is_over: threading.Event) -> None:
        """Say every few seconds what is waited for."""
        size, began_at = self._packed.needs.size_bytes, time.monotonic()
        while not is_over.wait(_SAY_EVERY_S):
            with self._lock:
                there = {host.host.name for host in self._there}
            missing = few_of([name for name in names if name not in there], 8)
            how = show_transfer(self._sent, size, time.monotonic() - began_at)
            self._say(f"the environment comes to {missing}: {how}")

    def _wait(self, host: RemoteHost) -> HostProblem | None:
        try:
            done = host.expect(messages.EnvironmentDone)
        except HostError as error:
            self.take_failed_hop(host, "it is lost")
            return error.problem
        if done.why is not None:
            host.abandon()
            self.take_failed_hop(host, "it has failed")
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
        self._send_from_here(after)
