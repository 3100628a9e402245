"""Ends of workers for tests, each with only what matters given."""

from kit.values import worker_end
from torchmuster.core.model.failure import EndKind, PythonError


def end_of(rank, kind, **given):
    defaults = {"attempt": 1, "local_rank": rank % 2, "node": f"n{rank // 2 + 1}"}
    return worker_end(kind, rank=rank, **{**defaults, "elapsed_s": 12.0, **given})


def raised(
    rank, type_name, message="", where="train.py:7", is_final=False, bases=(), own=None, **given
):
    trace = f'Traceback (most recent call last):\n  File "train.py", line 7\n{type_name}: {message}'
    said = {"type_name": type_name, "message": message, "where": where, "traceback": trace}
    error = PythonError(**said, is_final=is_final, bases=bases, own=own)
    return end_of(rank, EndKind.EXCEPTION, exit_code=1, error=error, **given)


def killed(rank, signum, **given):
    return end_of(rank, EndKind.SIGNAL, signum=signum, **given)


def exited(rank, code, **given):
    return end_of(rank, EndKind.EXIT_CODE, exit_code=code, **given)


def lost(rank, why, **given):
    return end_of(rank, EndKind.NODE_LOST, signum=9, detail=why, **given)


def succeeded(rank, **given):
    return end_of(rank, EndKind.SUCCESS, exit_code=0, **given)


def preempted(rank, **given):
    return end_of(rank, EndKind.PREEMPTED, exit_code=75, **given)
