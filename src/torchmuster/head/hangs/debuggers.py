"""Which ranks somebody debugs: meanwhile no rank hangs, and nothing is started again."""

from torchmuster.model import contract
from torchmuster.net import messages


class Debuggers(set[int]):
    """The ranks of one attempt that sit in a debugger, or wait for one."""

    _is_failure_seen = False

    def clear(self) -> None:
        """Begin with the next attempt."""
        super().clear()
        self._is_failure_seen = False

    def take(self, told: messages.Debugger) -> bool:
        """Note what a rank says of itself; say whether the user's client has to know it, to bring a debugger.

        Of ranks that have failed, only the first of an attempt is looked at: the others fail because of it, or wait until they are ended.
        """
        if not told.active:
            self.discard(told.rank)
            return False
        if told.waits == contract.PDB:
            if self or self._is_failure_seen:
                return False
            self._is_failure_seen = True
        self.add(told.rank)
        return bool(told.waits)
