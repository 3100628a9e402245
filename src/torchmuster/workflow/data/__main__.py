"""`python -m torchmuster.workflow.data ...`: the program that agents start to move files.

Standard output is JSON lines: {"progress": {...}}, {"note": "..."}, {"done": {...}} or
{"error": {...}}. The exit code is 0, 10 for a failure that may pass, 11 for a permanent one.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from types import FrameType
from typing import Any, NoReturn

from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.data import transfer
from torchmuster.workflow.data.checkpoint import CheckpointUpload, CheckpointUploader
from torchmuster.workflow.data.dataset import DatasetStore
from torchmuster.workflow.data.faults import DataError, explain
from torchmuster.workflow.data.files import TransferProgress

MAY_PASS = 10
WILL_NOT_PASS = 11
_PROGRESS_EVERY_S = 0.5


class Lines:
    """Writes JSON lines from any thread; progress at most twice a second, but always the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_s = 0.0

    def write(self, kind: str, value: Any) -> None:
        """Write one line."""
        with self._lock:
            sys.stdout.write(json.dumps({kind: value}) + "\n")
            sys.stdout.flush()

    def note(self, sentence: str) -> None:
        """Write a sentence for the user."""
        self.write("note", sentence)

    def progress(self, state: TransferProgress) -> None:
        """Write the progress, at limited intervals."""
        now_s = time.monotonic()
        if now_s >= self._next_s or state.files_done == state.num_files:
            self._next_s = now_s + _PROGRESS_EVERY_S
            self.write("progress", asdict(state))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where=self.prog)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    lines = Lines()
    try:
        options = _parser().parse_args(arguments)
        lines.write("done", options.work(options, lines))
    except MusterError as error:
        return _fail(error, lines)
    except BrokenPipeError:  # the agent has gone: nothing reads this any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return MAY_PASS
    except OSError as error:
        return _fail(explain(error, "this machine"), lines)
    return 0


def _fail(error: MusterError, lines: Lines) -> int:
    lines.write("error", error.parts())
    return MAY_PASS if isinstance(error, DataError) and error.may_pass else WILL_NOT_PASS


def _move(options: argparse.Namespace, lines: Lines) -> dict[str, Any]:
    moved = options.move(
        options.source,
        options.to,
        regex=options.regex,
        progress=lines.progress,
        note=lines.note,
        num_parallel=options.parallel,
    )
    return asdict(moved)


def _dataset_download(options: argparse.Namespace, lines: Lines) -> dict[str, Any]:
    store = DatasetStore(options.store, note=lines.note)
    wanted = store.resolve(options.name)
    moved = store.download(str(wanted), options.to, regex=options.regex, progress=lines.progress)
    return {**asdict(moved), "name": wanted.name, "version": wanted.version}


def _dataset_upload(options: argparse.Namespace, lines: Lines) -> dict[str, Any]:
    from torchmuster.workflow.data.reference import parse_metadata

    store = DatasetStore(options.store, note=lines.note)
    version = store.upload(
        options.name,
        options.source,
        paths=options.path or None,
        regex=options.regex,
        tags=options.tag,
        metadata=parse_metadata(options.metadata),
        labels=parse_metadata(options.label, "--label"),
        run_id=options.run_id,
        keep=options.update,
        progress=lines.progress,
    )
    return {"name": options.name.partition(":")[0], "version": version}


def _checkpoint(options: argparse.Namespace, lines: Lines) -> dict[str, Any]:
    uploader = CheckpointUploader(
        options.path, options.url, options.frequency_s, options.regex, note=lines.note
    )
    stop = threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()

    def done(result: CheckpointUpload) -> None:
        if result.number is not None:
            lines.note(f"checkpoint {result.number} uploaded: {result.num_files} files")

    return asdict(uploader.run(stop, done))


def _wait_for_end(stop: threading.Event) -> None:
    """Set `stop` when standard input closes: the parent has ended, or asks to stop."""
    while os.read(0, 4096):
        pass
    stop.set()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m torchmuster.workflow.data", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, parser_class=_Parser)
    one = _command(commands, "download", _move)
    one.add_argument("source", metavar="url")
    one.add_argument("--to", required=True)
    one.add_argument("--parallel", type=int, default=8)
    one.set_defaults(move=transfer.download)
    one = _command(commands, "upload", _move)
    one.add_argument("source")
    one.add_argument("to", metavar="url")
    one.add_argument("--parallel", type=int, default=8)
    one.set_defaults(move=transfer.upload)
    one = _command(commands, "dataset-download", _dataset_download)
    one.add_argument("--name", required=True)
    one.add_argument("--to", required=True)
    one.add_argument("--store")
    one = _command(commands, "dataset-upload", _dataset_upload)
    one.add_argument("--name", required=True)
    one.add_argument("--from", dest="source", required=True)
    one.add_argument("--store")
    one.add_argument("--run-id")
    one.add_argument("--update", action="store_true", help="keep the files of the newest version")
    for option in ("--path", "--metadata", "--label", "--tag"):
        one.add_argument(option, action="append", default=[])
    one = _command(commands, "checkpoint", _checkpoint)
    one.add_argument("--path", required=True)
    one.add_argument("--url", required=True)
    one.add_argument("--frequency-s", type=float, required=True)
    return parser


def _command(commands: Any, name: str, work: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, allow_abbrev=False)
    parser.add_argument("--regex")
    parser.set_defaults(work=work)
    return parser


if __name__ == "__main__":
    sys.exit(main())
