"""The user's terminal while a remote one is shown on it: every key passes, and it is put back in every ending."""

import os
import termios
import tty
from types import TracebackType
from typing import Any, Self

DEFAULT_SIZE = (24, 80)


class RawTerminal:
    """Puts a terminal into raw mode inside of `with`; does nothing where there is none.

    Args:
        fd: The terminal; None, or what is no terminal, is left as it is.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd if fd is not None and os.isatty(fd) else None
        self._before: list[Any] | None = None

    @property
    def is_raw(self) -> bool:
        """Say whether there is a terminal in raw mode."""
        return self._before is not None

    def __enter__(self) -> Self:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            self.again()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before, self._before = self._before, None
        if self._fd is not None and before is not None:
            try:
                termios.tcsetattr(self._fd, termios.TCSADRAIN, before)
            except termios.error:
                return  # the terminal has gone

    def again(self) -> None:
        """Set raw mode; after a stop, the shell has taken it away."""
        if self._fd is not None:
            tty.setraw(self._fd, termios.TCSADRAIN)

    def size(self) -> tuple[int, int]:
        """Return (rows, columns); those of an old terminal where there is none."""
        if self._fd is None:
            return DEFAULT_SIZE
        try:
            columns, rows = os.get_terminal_size(self._fd)
        except OSError:
            return DEFAULT_SIZE
        return (rows, columns) if rows and columns else DEFAULT_SIZE
