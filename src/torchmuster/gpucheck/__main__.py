"""Usage: `python -m torchmuster.gpucheck [--part correctness|bench] [--only NAME] [--out PATH]`."""

import argparse
import os
import signal
import sys

from torchmuster.core.files import atomic
from torchmuster.core.model.text import render_report, report_of_error
from torchmuster.errors import MusterError, UsageError
from torchmuster.gpucheck import conduct, kit, results
from torchmuster.gpucheck.table import BENCH, CHECKS, CORRECTNESS, GpuCheck


def main(argv: list[str]) -> int:
    """Run the checks; return 0 if none failed, 1 if one did, another code for an error."""
    options = _parser().parse_args(argv)
    if options.one:
        conduct.run_one(options.one, options.scratch)
        return 0
    try:
        checks = _choose(options.part, options.only)
        if options.list:
            print("\n".join(f"{c.name:18} {c.part:12} {c.promise}" for c in checks))
            return 0
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, _stop)
        machine = kit.look()
        path = _path(options.out, machine)
        ended = conduct.conduct(checks, machine, path)
        whole = results.read(path)
        atomic.replace_file(f"{path.removesuffix('.json')}.md", results.as_markdown(whole).encode())
    except KeyboardInterrupt as stop:
        print(f"stopped; what has ended is in {options.out}", file=sys.stderr)
        return int(str(stop) or 130)
    except (MusterError, OSError) as error:
        if isinstance(error, OSError):
            error = UsageError("the results can't be written", where=options.out, why=str(error))
        print(render_report(report_of_error(error)), file=sys.stderr, end="")
        return error.exit_code
    num = {word: sum(r.outcome == word for r in ended) for word in (results.PASSED, results.FAILED)}
    rest = len(ended) - sum(num.values())
    print(
        f"{num[results.PASSED]} passed, {num[results.FAILED]} failed, {rest} not possible here; {path}"
    )
    return 1 if num[results.FAILED] else 0


def _stop(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(128 + signum)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torchmuster.gpucheck", description="Try on this machine's GPUs what torchmuster promises.")  # fmt: skip
    parser.add_argument("--part", choices=(CORRECTNESS, BENCH), help="default: correctness")
    parser.add_argument("--only", action="append", default=[], metavar="NAMES", help="these checks, or those whose names begin so")  # fmt: skip
    parser.add_argument("--out", default="gpucheck.json", metavar="PATH", help="a file that several calls add to, or a folder")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the checks, run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    return parser


def _choose(part: str | None, only: list[str]) -> list[GpuCheck]:
    """Return the checks of a part, or the named ones.

    Raises:
        UsageError: A name matches no check.
    """
    words = [word for text in only for word in text.replace(",", " ").split()]
    for word in words:
        if not any(check.name.startswith(word) for check in CHECKS):
            raise UsageError(f"no check is named `{word}`", fix="--list prints all names")
    if words:
        return [c for c in CHECKS if c.name.startswith(tuple(words)) and part in (None, c.part)]
    return [check for check in CHECKS if check.part == (part or CORRECTNESS)]


def _path(out: str, machine: kit.GpuMachine) -> str:
    if out.endswith(".json"):
        return os.path.abspath(out)
    os.makedirs(out, exist_ok=True)
    return os.path.join(os.path.abspath(out), f"{results.default_name(machine)}.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
