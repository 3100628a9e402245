"""A session's side of an environment that comes to this host (`node/shipping`): what the client says of it, and what it hears."""

import os

from torchmuster.errors import MusterError
from torchmuster.net.address import own_addresses
from torchmuster.net.relay import SendsMessages
from torchmuster.net.remote_messages import (
    BringEnvironment,
    EnvironmentDone,
    EnvironmentHopFailed,
    EnvironmentPiece,
    EnvironmentPlaced,
    EnvironmentsPruned,
    EnvironmentWants,
    OfferEnvironment,
    PassEnvironment,
    PruneEnvironments,
)
from torchmuster.node.shipping import shelf as shelves
from torchmuster.node.shipping.arrival import ComingEnvironment
from torchmuster.node.shipping.shelf import Shelf, check_fit, try_torch

_MAX_ADDRESSES = 16
_REMOVE_S = 5.0


class EnvironmentPlace:
    """One environment on this host.

    Raises:
        MusterError: The host is not fit for it.

    Attributes:
        path: Its folder, once it is there.
    """

    def __init__(self, offer: OfferEnvironment, session: SendsMessages) -> None:
        self._offer, self._session = offer, session
        check_fit(offer.needs)
        self._shelf = Shelf(offer.needs, _here(offer.scratch))
        self.path = self._shelf.path
        self._arrival: ComingEnvironment | None = None
        self._tries = False

    def answer(self) -> None:
        """Tell the client whether it has to come, and where the host before may bring it.

        Raises:
            MusterError: There is no room.
            OSError: It can't be taken.
        """
        if self._shelf.take():
            self._session.send(EnvironmentPlaced(has=True))
            return
        self._shelf.check_room()
        arrival = ComingEnvironment(self._shelf, bytes.fromhex(self._offer.secret), self._end)
        self._arrival = arrival
        addresses = (*own_addresses(), "127.0.0.1")[:_MAX_ADDRESSES]
        self._session.send(EnvironmentPlaced(has=False, port=arrival.port, addresses=addresses))

    def take(self, message: PassEnvironment | BringEnvironment | EnvironmentPiece) -> None:
        """Do what the client says."""
        arrival = self._arrival
        if arrival is None:
            return
        match message:
            case PassEnvironment(addresses=addresses, port=port):
                arrival.pass_on(addresses, port, self._tell_failed_hop)
            case BringEnvironment(tries=tries):
                self._tries = self._tries or tries
                arrival.supersede(None)
                self._session.send(EnvironmentWants(index=arrival.wants))
            case EnvironmentPiece(index=index, data=data):
                if not arrival.take(index, data):
                    arrival.refuse("the environment came damaged: its checksum is another")

    def _tell_failed_hop(self, why: str) -> None:
        self._session.send(EnvironmentHopFailed(why=why))

    def _end(self, why: str | None) -> None:
        if why is None and self._tries:
            try:
                try_torch(self.path, self._offer.needs)
            except MusterError as error:
                why = f"{error.what}: {error.why}"
        self._session.send(EnvironmentDone(why=why))

    def close(self) -> None:
        """Remove what has not come whole."""
        if self._arrival is not None:
            self._arrival.close(_REMOVE_S)


def _here(scratch: str | None) -> str | None:
    """Return the site's folder on this host."""
    return os.path.expandvars(os.path.expanduser(scratch)) if scratch else None


def prune(wanted: PruneEnvironments) -> EnvironmentsPruned:
    """Remove old environments of this host, or say which they are; those that a run uses stay."""
    folder = shelves.find_folder(_here(wanted.scratch))
    found = shelves.old_ones(folder, wanted.older_s, wanted.most_bytes)
    if not wanted.dry_run:
        found = [one for one in found if shelves.forget(one[0].path)]
    paths = tuple(kept.path for kept, _ in found)
    return EnvironmentsPruned(paths=paths, size_bytes=sum(size for _, size in found))
