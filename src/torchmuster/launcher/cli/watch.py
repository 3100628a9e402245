"""`muster status --watch`: the same again, in place on a terminal; elsewhere only what has changed in it."""

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable

_EVERY_S = 2.0


def watch_status(run: str, print_once: Callable[[], int]) -> int:
    """Print until the run has ended; return the code of the last time.

    Args:
        run: Names it.
        print_once: Prints where it stands.

    Raises:
        NotFoundError: There is no such run.
    """
    from torchmuster.launcher.views.elsewhere import copied
    from torchmuster.launcher.views.find import find_run

    view = find_run(run)
    before, pause = "", threading.Event()
    with copied(view.run_dir), contextlib.suppress(KeyboardInterrupt):
        while True:
            has_ended = find_run(
                view.run_dir.path
            ).state.is_final  # first: the picture of the end is the last
            with contextlib.redirect_stdout(io.StringIO()) as said:
                code = print_once()
            text = said.getvalue()
            if text != before:
                _show(text)
            before = text
            if has_ended:
                return code
            pause.wait(_EVERY_S)
    return 130


def _show(text: str) -> None:
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        text = "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J"
    sys.stdout.write(text)
    sys.stdout.flush()
