"""Every so many steps, in front of an optimizer's step: are the weights the same on all ranks, and do two ranks make the same of a batch?

    weights of all ranks compared -> each rank makes the forward and backward of another one again -> digests compared
                                                             | one differs
                                              made again by its own rank, by the other once more, and by a third

A processor that adds wrongly once in a while is not told from a right one by anything that a single rank sees: the loss stays
plausible. All ranks decide alike, from what all have gathered. The rank that is alone against others that agree raises
`DiffersError`, and its node gets no ranks again; where nobody can tell who is right, all raise it.
"""

import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchmuster.errors import MusterError, UsageError
from torchmuster.model import contract
from torchmuster.model.heartbeat import RankPhase
from torchmuster.model.ranks import name_ranks
from torchmuster.train.exchange import broadcast_bytes, gather_json, shift_bytes
from torchmuster.train.memory.neighbours import NodeStand, choose_shifts
from torchmuster.train.objects import Objects
from torchmuster.train.sinks import MetricsRecord
from torchmuster.train.verify.judge import Making, Verdict, judge, odd_weights
from torchmuster.train.verify.passes import (
    CantRepeatError,
    Passes,
    PassNotes,
    digest,
    from_bytes,
    parcel_of,
    repeat,
)
from torchmuster.train.wrap import unwrap

_FOR_THE_ODD_ONE_S = 60.0  # until the launcher has ended the others


class DiffersError(MusterError):
    """A rank has computed something else than another one from the same numbers.

    Attributes:
        muster_blames_node: It is this very rank, and it is alone against others that agree.
    """

    muster_blames_node = False


class CantVerifyError(UsageError):
    """What is trained can't be verified, in this attempt or another."""


def wanted_every(verify_every: int | None) -> int | None:
    """Return after how many steps to verify: what the script says, else what `muster run --verify-every` says."""
    if verify_every is not None:
        return verify_every
    text = os.environ.get(contract.VERIFY_VARIABLE)
    return int(text) if text else None


def verify_steps(
    every: int | None, run: Any, objects: Objects, world: Any, record: MetricsRecord
) -> None:
    """Verify a run's steps from now on, if that is asked for.

    Raises:
        CantVerifyError: `every` is below one, or what is trained can't be verified.
    """
    every = wanted_every(every)
    if every is None or contract.replay_order(os.environ) is not None:
        return
    if every < 1:
        raise CantVerifyError(f"verify_every is {every}, below one", where="World.resume")
    if world.world_size == 1:
        world.say("verify_every: there is one rank, so its steps are compared with nothing")
        return
    StepVerifier(every, run, objects, world, record)


class StepVerifier:
    """Verifies every so many steps.

    Args:
        every: How many.
        run: Counts the steps.
        objects: The run's: their models are called again.
        world: The ranks.
        record: Rank 0 notes in it what was verified.

    Attributes:
        every: See above.
    """

    def __init__(
        self, every: int, run: Any, objects: Objects, world: Any, record: MetricsRecord
    ) -> None:
        self.every, self._run, self._world, self._record = every, run, world, record
        self._models = {
            name: thing
            for name, thing in objects.by_name.items()
            if isinstance(thing, nn.Module) and any(p.requires_grad for p in thing.parameters())
        }
        _check(objects, self._models)
        self._shifts = self._choose_shifts()
        self._notes = PassNotes(self._models, world.step_state)
        self._noted_step = -1  # of what is noted
        self._done_step = -1  # the last that was verified
        self._is_first = True
        for name, model in self._models.items():
            model.register_forward_pre_hook(self._before(name), with_kwargs=True)
            model.register_forward_hook(self._after(name))
        for optimizer in objects.optimizers():
            optimizer.register_step_pre_hook(self._look)

    def _choose_shifts(self) -> list[int]:
        """Return how far away the ranks are that make a rank's pass again: on other nodes where there are any."""
        mine = {"node": self._world.node_rank, "computes": _computes_as(self._world.device)}
        told = gather_json(mine)
        kinds: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            kinds.setdefault(one["computes"], []).append(rank)
        if len(kinds) > 1:
            raise CantVerifyError(
                "verify_every compares bit for bit, and the ranks compute with different hardware or versions",
                where="World.resume",
                why="; ".join(f"{name_ranks(ranks)}: {kind}" for kind, ranks in kinds.items()),
                fix="train on nodes of one kind, or without verify_every",
            )
        self._nodes = [int(one["node"]) for one in told]
        return choose_shifts([NodeStand(machine=str(one["node"])) for one in told], 2)

    # What is noted.

    def _before(self, name: str) -> Callable[..., None]:
        def before(model: nn.Module, inputs: Any, kwargs: Any) -> None:
            step = self._run.steps_done + 1
            if step % self.every or step == self._done_step:
                if self._notes.is_on:
                    self._notes.end()
            else:
                if self._noted_step != step or not self._notes.is_on:
                    self._notes.begin()
                    self._noted_step = step
                self._notes.before(name, model, inputs, kwargs)

        return before

    def _after(self, name: str) -> Callable[..., Any]:
        return lambda model, inputs, outputs: self._notes.after(name, outputs)

    # What is compared.

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._noted_step  # the script may have counted this step already
        if not self._notes.is_on or step == self._done_step:
            return
        self._done_step = step
        began = time.monotonic()
        with self._world.step_state.heartbeat.during(RankPhase.EVALUATE):
            self._compare_weights(step)
            self._compare_passes(step)
        self._notes.end()
        elapsed_s = time.monotonic() - began
        if self._world.rank == 0:
            self._record.event("verified", step=step, elapsed_s=round(elapsed_s, 6))
        if self._is_first:
            self._is_first = False
            self._world.say(
                f"step {step}: made again on other ranks, bit for bit the same ({elapsed_s:.3f} s);"
                f" from here on every {self.every} steps"
            )

    def _compare_weights(self, step: int) -> None:
        parameters = [
            p.detach() for model in self._models.values() for p in unwrap(model).parameters()
        ]
        odd, groups = odd_weights(gather_json(digest(parameters)))
        if len(groups) == 1:
            return
        words = "; ".join(
            f"{name_ranks(ranks)} have the same" for ranks in groups if len(ranks) > 1
        )
        self._tell(step, odd, "weights")
        if odd is None:
            raise DiffersError(
                f"the weights before step {step} are not the same on all ranks",
                why=words or "no two ranks have the same",
                fix="does the script change weights on some ranks only? Otherwise look at the machines: `muster doctor`",
            )
        self._end(
            odd,
            f"before step {step} rank {odd} has other weights than all other ranks",
            words,
            "does the script change weights on this rank only? Otherwise look at its memory and its device",
        )

    def _compare_passes(self, step: int) -> None:
        first, second = self._shifts[0], self._shifts[-1]
        own = self._notes.result()
        passes, parcel = self._parcel()
        rounds = [(0, own), (first, self._again(parcel, first))]
        makings = _makings(rounds)
        if not judge(makings, self._nodes).batches:
            return
        live = self._repeat(passes)
        again = self._again(parcel, 0)
        more = [(shift, self._again(parcel, shift)) for shift in dict.fromkeys((first, second))]
        makings += _makings([(0, live), (0, again), *more])
        # Where a rank comes to something else from a copy than from what it has itself, copies prove nothing.
        is_told = all(gather_json(live == again))
        verdict = judge(makings, self._nodes)
        self._raise(step, verdict if is_told else Verdict(batches=verdict.batches), makings)

    def _parcel(self) -> tuple[Passes, bytes]:
        """Return what is needed to make the passes again, here and on another rank, once all ranks can give it."""
        buffers = from_bytes(broadcast_bytes(self._notes.synced_buffers(), 0), self._world.device)
        passes, parcel, why = Passes(), b"", ""
        try:
            passes = self._notes.passes(buffers)
            parcel = parcel_of(passes)
        except CantRepeatError as error:
            why = str(error)
        _refuse(gather_json(why))
        return passes, parcel

    def _again(self, parcel: bytes, shift: int) -> str:
        return self._repeat(from_bytes(shift_bytes(parcel, shift), self._world.device))

    def _repeat(self, passes: Passes) -> str:
        made, why = "", ""
        was_on, self._notes.is_on = self._notes.is_on, False
        try:
            made = repeat(passes, self._models, self._world.device)
        except CantRepeatError as error:
            why = str(error)
        self._notes.is_on = was_on
        _refuse(gather_json(why))
        return made

    def _raise(self, step: int, verdict: Verdict, makings: list[Making]) -> None:
        odd = verdict.odd
        self._tell(step, odd, "gradients")
        batches = name_ranks(list(verdict.batches))
        if odd is None:
            same = sum(
                len({one.digest for one in makings if one.batch == batch and one.by == batch}) == 1
                for batch in verdict.batches
            )
            why = (
                "no two ranks agree against a single third one, so nobody can tell which is right"
                if same == len(verdict.batches)
                else "a rank that makes its own batch again comes to something else itself"
            )
            raise DiffersError(
                f"step {step} made again on other ranks is not bit for bit the same: the batch of {batches}",
                why=why,
                fix="does the model draw random numbers that are not torch's, keep state outside of buffers, or use operations that"
                " are not deterministic (`torch.use_deterministic_algorithms(True)`)? Otherwise look at the machines: `muster doctor`",
            )
        against = name_ranks(list(verdict.against))
        agree = "agree" if len(verdict.against) > 1 else "has another result"
        how = "once: made again, it is the same" if verdict.is_once else "each time"
        self._end(
            odd,
            f"rank {odd} has computed something else than the others in step {step}",
            f"outputs and gradients of the batch of {batches}: {against} {agree}, rank {odd} differs {how}",
            "does the model do something else on this rank (`if rank == 0:`), or in its first call? Otherwise look at the memory and the"
            " device of its machine",
        )

    def _tell(self, step: int, odd: int | None, what: str) -> None:
        if self._world.rank == 0:
            self._record.event("differs", step=step, what=what, rank=odd)

    def _end(self, odd: int, what: str, why: str, fix: str) -> None:
        """Raise on the odd rank; the others wait for the launcher, so that nobody else is taken for the cause."""
        error = DiffersError(what, where=f"rank {odd}", why=why, fix=fix)
        if self._world.rank != odd:
            threading.Event().wait(_FOR_THE_ODD_ONE_S)
            raise error
        error.muster_blames_node = True
        raise error


def _makings(rounds: list[tuple[int, str]]) -> list[Making]:
    """Return who has made which batch on all ranks, in the order of the rounds; a collective."""
    told: list[list[str]] = gather_json([made for _, made in rounds])
    size = len(told)
    return [
        Making(batch=(by + shift) % size, by=by, digest=told[by][number])
        for number, (shift, _) in enumerate(rounds)
        for by in range(size)
    ]


def _refuse(told: list[str]) -> None:
    """Refuse on all ranks what one of them can't repeat."""
    ranks = [rank for rank, why in enumerate(told) if why]
    if ranks:
        raise CantVerifyError(
            "this step can't be made again on another rank, so verify_every can't compare it",
            where=name_ranks(ranks),
            why=told[ranks[0]],
            fix="train without verify_every",
        )


def _check(objects: Objects, models: dict[str, nn.Module]) -> None:
    if objects.is_sharded:
        raise CantVerifyError(
            "verify_every needs models of which each rank has the whole",
            where="World.resume",
            why="a rank has only a part of a sharded model, so no other can make its step again",
            fix="tm.wrap(model) without sharded=True",
        )
    if not models or not objects.optimizers():
        raise CantVerifyError(
            "verify_every needs model= and optimizer=",
            where="World.resume",
            why="models are called again, in front of an optimizer's step",
        )
    synced = [
        n for n, m in models.items() if any(isinstance(o, nn.SyncBatchNorm) for o in m.modules())
    ]
    if synced:
        raise CantVerifyError(
            f"verify_every can't make a step of `{synced[0]}` again: it has SyncBatchNorm",
            where="World.resume",
            why="its statistics are sums over all ranks, whose last bits depend on their order",
            fix="train without verify_every",
        )
    bare = [name for name, model in models.items() if unwrap(model) is model]
    if bare:
        raise CantVerifyError(
            f"verify_every needs models that are the same on all ranks: `{bare[0]}` is not wrapped",
            where="World.resume",
            fix=f"{bare[0]} = tm.wrap({bare[0]})",
        )


def _computes_as(device: torch.device) -> str:
    """Return what the last bits of a result depend on."""
    words = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        words += [torch.cuda.get_device_name(device), f"CUDA {torch.version.cuda}"]
    else:
        words += [platform.machine(), torch.backends.cpu.get_cpu_capability(), _cpu_vendor()]
    return ", ".join(filter(None, words))


def _cpu_vendor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("vendor_id"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""
