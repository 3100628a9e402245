"""A barrier that names the missing ranks.

It uses the store, not a collective: a late rank is identified by its missing key.
"""

from datetime import timedelta
from typing import Any

from torchmuster.core.model.ranks import name_ranks
from torchmuster.train.group import WorldError, first_line


class StoreBarrier:
    """Barriers by name; each can be used any number of times."""

    def __init__(self, store: Any, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._rounds: dict[str, int] = {}

    def wait(self, name: str, *, timeout_s: float) -> None:
        """Return when all ranks have called `wait` with this name as often as this rank.

        Raises:
            WorldError: Some did not within `timeout_s`; the message names them.
        """
        number = self._rounds.get(name, 0)
        self._rounds[name] = number + 1
        prefix = f"muster/barrier/{name}/{number}"
        self._store.set(f"{prefix}/{self._rank}", b"1")
        if self._store.add(f"{prefix}/count", 1) == self._world_size:
            self._store.set(f"{prefix}/all", b"1")
        try:
            self._store.wait([f"{prefix}/all"], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            missing = self._missing(prefix, error)
            if not missing:
                return  # the last one has just arrived
            who = name_ranks(missing)
            raise WorldError(
                f"{len(missing)} of {self._world_size} workers did not reach the barrier `{name}`"
                f" within {timeout_s:g} s",
                where=who,
                why=f"rank {self._rank} waited for {who}",
                fix="check what they do: muster logs RUN --rank N, or py-spy dump --pid PID",
            ) from error

    def _missing(self, prefix: str, error: RuntimeError) -> list[int]:
        try:
            ranks = range(self._world_size)
            return [rank for rank in ranks if not self._store.check([f"{prefix}/{rank}"])]
        except RuntimeError:
            raise WorldError(
                "the store of the process group is gone",
                where=f"rank {self._rank}, in a barrier",
                why=first_line(error),
            ) from error
