"""Fork: the parent has imported torch and never touched CUDA, its children use it."""

from torchmuster.gpucheck.kit import ImpossibleError, Kit, Ran

_ONE = ("--nproc-per-node", 1)
_PRELOAD = "torchmuster.gpucheck.scripts.early"


def _expect_total(ran: Ran, total: float) -> None:
    ran.expect(ran.one("total") == total, f"the result is {ran.one('total')}, not {total}")


def child_uses_device(kit: Kit) -> None:
    """A forked worker multiplies on the device, and no process above it has one open."""
    ran = kit.muster(_ONE, "use", "plain")
    _expect_total(ran, 8192.0)
    ran.expect(ran.one("forked"), "the worker is no fork of a process with torch")
    if not ran.one("holds_itself"):
        raise ImpossibleError("this kernel does not show which process has a device open")
    held = ran.one("held_above")
    ran.expect(not held, f"processes {held} above the worker have a device open")


def early_initialisation(kit: Kit) -> None:
    """CUDA that is initialised before the fork is refused with the line that did it, and the workers start afresh."""
    ran = kit.muster([*_ONE, "--preload", _PRELOAD], "use", "plain", env={"GPUCHECK_EARLY": "init"})
    ran.expect_words("initialised CUDA in the spawner", "early.py:")
    _expect_total(ran, 8192.0)
    ran.expect(not ran.one("forked"), "the worker was forked all the same")


def early_questions(kit: Kit) -> None:
    """`is_available()` and `device_count()` before the fork: the worker uses its device, forked or not."""
    for act in ("available", "count"):
        options = [*_ONE, "--preload", _PRELOAD]
        ran = kit.muster(options, "use", "plain", env={"GPUCHECK_EARLY": act})
        _expect_total(ran, 8192.0)
        forked = ran.one("forked")
        ran.expect(forked or "in the spawner" in ran.text, f"{act}: not forked, without a reason")


def pinned_memory(kit: Kit) -> None:
    """Pinned memory in a forked worker, copied without waiting."""
    ran = kit.muster(_ONE, "use", "pinned")
    ran.expect(ran.one("is_pinned"), "the memory is not pinned")
    ran.expect(abs(ran.one("total") / (2**39 - 2**19) - 1) < 1e-3, f"wrong: {ran.one('total')}")


def graphs(kit: Kit) -> None:
    """A CUDA graph is captured and replayed in a forked worker."""
    _expect_total(kit.muster(_ONE, "use", "graph"), 3072.0)


def compiled(kit: Kit) -> None:
    """`torch.compile` in a forked worker."""
    ran = kit.muster(_ONE, "use", "compiled", ok=None)
    if ran.code and "compiler" in ran.text and "FailedError to find" in ran.text:
        raise ImpossibleError("this machine has no C compiler")
    ran.expect(ran.code == 0, "it did not succeed")
    _expect_total(ran, 3072.0)
