"""Runs writes beside the loop, one at a time, and brings their errors back to it."""

import threading
import time

from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.state import SnapshotError


class Saver:
    """The one background write of this rank.

    Attributes:
        last_s: How long the last write took.
        last_step: The step of the last order.
        written_step: The step of the last order that was carried out here: on rank 0, committed.
    """

    def __init__(self, crew: writer.Crew) -> None:
        self.crew = crew
        self.last_s = 0.0
        self.last_step: int | None = None
        self.written_step: int | None = None
        self._thread: threading.Thread | None = None
        self._error: SnapshotError | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a write is going on."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, order: writer.WriteOrder) -> None:
        """Begin to write `order` in the background; the last one must have ended."""
        self.wait()
        self.last_step = order.step
        self._thread = threading.Thread(
            target=self._run, args=(order,), name="muster-save", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when the last write is done.

        Raises:
            SnapshotError: It failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what the last write failed with, if it did; once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, order: writer.WriteOrder) -> None:
        began = time.monotonic()
        try:
            writer.write(self.crew, order)
            self.written_step = order.step
        except SnapshotError as error:
            self._error = error
        except RuntimeError as error:  # of the store
            self._error = SnapshotError(
                f"the snapshot of step {order.step} was given up",
                where=self.crew.folder.url,
                why=f"the store of the process group is gone: {error}",
            )
        except BaseException as error:  # noqa: BLE001 (a thread's traceback would go unseen)
            self._error = SnapshotError(
                f"the snapshot of step {order.step} failed", why=f"{type(error).__name__}: {error}"
            )
        finally:
            self.last_s = time.monotonic() - began
