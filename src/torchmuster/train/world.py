"""The world of a training script: rank, device, process group, and methods to train with them.

world = tm.init()
model = world.wrap(Net())
data = world.loader(train_set, global_batch_size=256, shuffle=True, seed=0)
run = world.resume(model=model, optimizer=optimizer, data=data)
for epoch in run.epochs(10):
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        run.step(loss=loss)
"""

import atexit
import contextlib
import functools
import sys
import uuid
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchmuster.errors import UsageError
from torchmuster.train import group, rng
from torchmuster.train.barrier import StoreBarrier
from torchmuster.train.batches.loader import Loader, LoaderSettings
from torchmuster.train.batches.stream import open_loader
from torchmuster.train.evaluation import Evaluation, EvaluationWatch
from torchmuster.train.exchange import broadcast_bytes
from torchmuster.train.finite import watch_gradients
from torchmuster.train.heartbeat import StepState
from torchmuster.train.launch import Launcher
from torchmuster.train.memory import MemorySettings, open_memory
from torchmuster.train.meter import RunMetrics
from torchmuster.train.objects import Objects
from torchmuster.train.once import OncePlace, folder_of
from torchmuster.train.once import once as once_in
from torchmuster.train.replay import is_replay, make_run
from torchmuster.train.run import Run, RunSettings
from torchmuster.train.saves import Saves, choose_writers, default_folder, record_path
from torchmuster.train.sinks import MetricSink, MetricsRecord, open_sinks
from torchmuster.train.verify.watch import verify_steps
from torchmuster.train.wrap import check_model, unwrap, wrap_sharded, wrap_whole

# Refuse options of `World.resume` that can't work before the first step.


def check_options(when_busy: str, on_save_error: str, **counts: int | None) -> None:
    """Refuse invalid options of `World.resume`.

    Raises:
        UsageError: An option is unknown, or a count is not a whole number or below one.
    """
    if when_busy not in ("wait", "skip") or on_save_error not in ("raise", "warn"):
        raise UsageError(
            "when_busy is `wait` or `skip`, on_save_error `raise` or `warn`",
            where=f"when_busy={when_busy!r}, on_save_error={on_save_error!r}",
        )
    for name, value in counts.items():
        if value is None:
            continue
        is_number = isinstance(value, (Integral, float)) and not isinstance(value, bool)
        if not is_number or value % 1:  # accepts numpy's numbers and 1e3
            raise UsageError(f"{name} is {value!r}, no whole number", where="World.resume")
        if value < 1:
            raise UsageError(f"{name} is {value}, below one", where="World.resume")
    copies = counts.get("memory_copies") or 1
    if copies > 1 and counts.get("memory_every_steps") is None:
        raise UsageError(
            f"memory_copies={copies} has no effect without memory_every_steps",
            where="World.resume",
            fix="memory_every_steps=1, or leave memory_copies out",
        )


P = ParamSpec("P")
R = TypeVar("R")

_world: "World | None" = None


def init(
    *,
    seed: int = 0,
    timeout_s: float = group.DEFAULT_TIMEOUT_S,
    device: str | None = None,
    share_gpus: bool = False,
) -> "World":
    """Join the world of the launcher that started this process, or a world of one worker.

    Works under `muster`, `torchrun`, `srun` (one task per worker), `mpiexec` and without a
    launcher. Seeds torch, numpy and `random` with `seed`, equal on all ranks, so that all begin
    with the same weights; `resume` seeds them again, differently on each rank.

    Args:
        seed: For all generators.
        timeout_s: Limit for a collective and for the wait for a missing rank, in seconds.
        device: `cpu` or `cuda`; default: CUDA if torch sees a GPU.
        share_gpus: Let several ranks use one GPU, with Gloo, since NCCL refuses two ranks on one.

    Raises:
        UsageError: The environment contradicts itself.
        WorldError: The world differs from what the launcher announced.
    """
    global _world
    if _world is not None:
        raise UsageError(
            "tm.init() was called when this process was in its world already",
            fix="call it once, before tm.wrap and tm.loader, which join by themselves",
        )
    group.print_own_errors_in_words(_note_failure)
    rng.seed_everything(seed)
    _world = World(group.join(timeout_s=timeout_s, device=device, share_gpus=share_gpus), seed)
    atexit.register(_world.close)
    _world.say(_world.describe())
    return _world


def _note_failure() -> None:
    if _world is not None:
        _world._failed = True


def current() -> "World":
    """Return this process's world; call `init()` if there is none yet."""
    return _world if _world is not None else init()


class World:
    """The ranks that train together; made by `init`.

    Attributes:
        rank: The rank of this process, `0 .. world_size - 1`.
        device: The device of this rank.
        launcher: The launcher that started it.
        step_state: The current batch, shared by loader, model and run.
    """

    def __init__(self, standing: group.RankInfo, seed: int) -> None:
        self.rank = standing.launch.rank
        self.world_size = standing.launch.world_size
        self.local_rank = standing.local_rank
        self.local_world_size = standing.local_world_size
        self.node_rank = standing.node_rank
        self.num_nodes = standing.num_nodes
        self.device = standing.device
        self.launcher: Launcher = standing.launch.launcher
        self.seed = seed
        self.step_state = StepState()
        self._standing = standing
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._run: Run | None = None
        self._optimizers: RemovableHandle | None = None
        self._failed = False
        # A store may outlive an attempt (torchrun's does): the keys of an earlier one must not be
        # found.
        self.token = broadcast_bytes(uuid.uuid4().hex.encode(), 0).decode()
        self._store = self.connect()
        self._barrier = StoreBarrier(self._store, rank=self.rank, world_size=self.world_size)

    def describe(self) -> str:
        """Return one line on the world: sizes, device, launcher, interface, timeout."""
        standing, kind = self._standing, self.device.type
        workers = "worker" if self.world_size == 1 else "workers"
        nodes = "node" if self.num_nodes == 1 else "nodes"
        backend = "nccl" if kind == "cuda" and not standing.shares_gpus else "gloo"
        over = f" over {standing.interface}" if standing.interface else ""
        return (
            f"{self.world_size} {workers} on {self.num_nodes} {nodes}, {kind}, {backend}{over},"
            f" started by {self.launcher.value}, timeout {self.timeout_s:g} s"
        )

    @property
    def timeout_s(self) -> float:
        """Limit for a collective and for the wait for a rank, in seconds."""
        return self._standing.timeout_s

    def connect(self) -> Any:
        """Return a new connection to the group's store: a waiting call blocks its connection."""
        return dist.PrefixStore(f"muster/{self.token}", self._standing.connect())

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line on standard error, on rank 0 only."""
        if self.rank == 0:
            # The terminal may be closed: training must still be saved.
            with contextlib.suppress(OSError):
                print(f"muster: {text}", file=sys.stderr, flush=True)

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """Wait until all ranks have reached this barrier.

        Raises:
            WorldError: Some did not within `timeout_s`; the message names them.
        """
        self._barrier.wait(name, timeout_s=timeout_s or self._standing.timeout_s)

    def wrap(
        self,
        /,
        model: nn.Module,
        *,
        sharded: bool = False,
        replicas: int = 1,
        compile: bool = False,  # noqa: A002 (torch's own word)
        settle: bool = True,
        **options: Any,
    ) -> nn.Module:
        """Move `model` to this rank's device and wrap it for training with the other ranks.

        The loss must be the mean over the rank's samples: gradients are weighted by the share of
        the global batch, so that they equal those of the mean over the global batch.

        Args:
            model: Not yet wrapped. Make the optimizer after this call.
            sharded: FSDP2 (`fully_shard`) instead of DistributedDataParallel.
            replicas: With `sharded`: the number of replicas, each sharded over its ranks (HSDP).
            compile: Use torch.compile.
            settle: Run a throw-away backward before the first step, so that a resumed process sums
                gradients in the
                same order as one that never stopped (bitwise equality over restarts from 3 ranks
                on).
            options: Passed to DistributedDataParallel or `fully_shard`.
        """
        check_model(model, self._models)
        model = model.to(self.device)
        if compile:
            model.compile()
        state, kind = self.step_state, self.device.type
        if sharded:
            given = {"device_type": kind, "num_replicas": replicas, "options": options}
            wrapped = wrap_sharded(model, state, **given)
        else:
            if kind == "cuda":
                options.setdefault("device_ids", [self.device])
            wrapped = wrap_whole(model, state, settle=settle, options=options)
        self._models.add(unwrap(wrapped))
        return wrapped

    def loader(
        self,
        /,
        dataset: Any,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        accumulate: int = 1,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> Loader:
        """Return this rank's batches of a sequence that depends on (seed, epoch) alone.

        Args:
            dataset: Map-style, or iterable by the contract of `docs/data.md`.
            global_batch_size: Samples per step over all ranks: constant when the world size
                changes.
            batch_size: Instead: samples per step on each rank.
            shuffle: Use another random order in each epoch.
            seed: The seed of the order and of random augmentation.
            accumulate: Micro-batches per step; gradients are reduced at the last one.
            drop_last: Drop a last step that is smaller.
            num_workers: Number of loader processes of this rank.
            collate_fn: As in torch's DataLoader.
            options: Passed to torch's DataLoader.

        Raises:
            UsageError: A size is below one, or both batch sizes are given.
            DatasetError: The dataset is empty or has no length.
        """
        settings = LoaderSettings(
            global_batch_size=global_batch_size,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            accumulate=accumulate,
            drop_last=drop_last,
            num_workers=num_workers,
        )
        options.setdefault("pin_memory", self.device.type == "cuda")
        loader = open_loader(self, dataset, settings, collate_fn, options)
        self._loaders.add(loader)
        return loader

    def evaluation(
        self,
        /,
        dataset: Any,
        *,
        batch_size: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> Evaluation:
        """Return this rank's batches of `dataset`, with each sample on one rank, for exact metrics.

        Raises:
            UsageError: The batch size is below one.
            DatasetError: The dataset is empty or has no length.
        """
        options.setdefault("pin_memory", self.device.type == "cuda")
        evaluation = Evaluation(
            dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            device=self.device,
            models=lambda: list(self._models),
            watch=lambda: self._run or EvaluationWatch(),
            say=self.say,
            collate=collate_fn,
            options=options,
        )
        self._loaders.add(evaluation)
        return evaluation

    def once(
        self, name: str, *, per: str = "node", folder: str | None = None
    ) -> AbstractContextManager[bool]:
        """Let one process per node (or per run) do a piece of work while the others wait.

            with world.once("unpack", folder=scratch) as mine:
                if mine:
                    unpack(archive, scratch)

        Args:
            name: The name of the work, unique in `folder`.
            per: `node` or `run`.
            folder: The folder of the markers; default: the node's temporary folder, or the run's.

        Raises:
            OnceError: The process that did the work failed; raised on all ranks that wait for it.
        """
        run_id = self._standing.launch.run_id
        place = folder_of(per, folder, default_folder(), run_id, self.token, self.node_rank)
        return once_in(name, OncePlace(folder=place, token=self.token, say=self._say_anywhere))

    def resume(
        self,
        /,
        *,
        data: Loader | None = None,
        folder: str | None = None,
        every_steps: int | None = None,
        every_s: float | None = 300.0,
        every_epoch: bool = True,
        memory_every_steps: int | None = None,
        memory_copies: int = 1,
        memory_mb_per_s: float | None = None,
        keep: int = 3,
        asynchronous: bool = True,
        when_busy: str = "wait",
        on_save_error: str = "raise",
        on_nan: str = "ignore",
        verify_every: int | None = None,
        save_timeout_s: float = 600.0,
        log_every: int = 50,
        time_limit_s: float | None = None,
        tensorboard: str | None = None,
        sinks: list[MetricSink] | None = None,
        **objects: Any,
    ) -> Run:
        """Load the newest good snapshot, if there is one, and return the run.

        Args:
            data: The loader whose position is saved.
            folder: A path, or a URL that fsspec supports; default: `snapshots/` in the run
                directory of `muster`, else in the working directory.
            every_steps: Save after this many steps.
            every_s: Save after this many seconds, checked every `log_every` steps; None: never.
            every_epoch: Save at the end of every epoch.
            memory_every_steps: After this many steps, save into the nodes' memory, which outlives
                the workers.
            memory_copies: On how many other nodes each node's part of a sharded model is kept; a
                whole model is on each node anyway.
            memory_mb_per_s: The most that a rank sends to other nodes for that.
            keep: How many snapshots are kept.
            asynchronous: Write in the background; the loop waits for the copy only.
            when_busy: `wait` for a save that is still running, or `skip` the new one.
            on_save_error: `raise` when a save failed, or `warn` and continue training.
            on_nan: If a step's gradients are not finite: `ignore` it, `stop`, `skip` the step, or
                `replay`: stop, and repeat its forward.
            verify_every: After this many steps, repeat a step on another rank and compare bit for
                bit; default: `--verify-every`.
            save_timeout_s: How long rank 0 waits for the other ranks' parts.
            log_every: Steps between two reductions of the metrics.
            time_limit_s: Save and stop before this many seconds have passed. Under Slurm the end of
                the job counts as well.
            tensorboard: A folder for TensorBoard's files.
            sinks: More destinations of metrics.
            objects: `model=`, `optimizer=`, and any other object with state_dict() and
                load_state_dict().

        Raises:
            UsageError: An object can't be saved, or an option has an invalid value.
            SnapshotError: There are snapshots, but none is good or none fits the script.
        """
        counts = {"every_steps": every_steps, "keep": keep, "log_every": log_every}
        counts |= {"memory_every_steps": memory_every_steps, "memory_copies": memory_copies}
        check_options(when_busy, on_save_error, **counts)
        if self._run is not None:
            raise UsageError("resume() was called twice", fix="put all objects into one call")
        things = Objects(objects)
        things.check(World.resume.__kwdefaults__ or ())
        things.check_optimizers(self._models)
        if data is not None and not isinstance(data, Loader):
            raise UsageError(
                f"`data` is a {type(data).__name__}, whose position can't be saved",
                where="World.resume",
                fix="make it with tm.loader(dataset, ...)",
            )
        if is_replay():  # it must not write where the replayed run does
            folder, sinks, tensorboard, memory_every_steps = None, None, None, None
        where, sharded = folder or default_folder(), things.is_sharded
        writers = choose_writers(
            self, where, keep=keep, timeout_s=save_timeout_s, is_sharded=sharded
        )
        in_memory = None
        if memory_every_steps is not None:
            wanted = MemorySettings(memory_every_steps, memory_copies, memory_mb_per_s)
            in_memory = open_memory(wanted, writers, self, is_sharded=sharded)
        record = MetricsRecord(record_path(writers.folder))
        chosen = open_sinks(sinks, tensorboard) if self.is_first else []
        metrics = RunMetrics(self, record, chosen)

        def warn(text: str) -> None:
            metrics.end_line()
            self.say(f'{text}; training goes on (on_save_error="warn")')

        warns = warn if on_save_error == "warn" else None
        skips = when_busy == "skip"
        saves = Saves(things, writers, record, memory=in_memory, warn=warns, skips=skips)
        settings = RunSettings(
            every_steps=every_steps,
            every_s=every_s,
            every_epoch=every_epoch,
            asynchronous=asynchronous,
            log_every=log_every,
            time_limit_s=time_limit_s,
        )
        run = make_run(on_nan, self, things, data, settings, saves, metrics)
        watch_gradients(on_nan, run, things, data, self, record)
        verify_steps(verify_every, run, things, self, record)
        run.begin(self.seed)
        self._run, self._optimizers = run, things.refuse_others(self._models)
        return run

    def close(self) -> None:
        """Wait for the last save, end loader workers, leave the process group; safe to repeat."""
        global _world
        if _world is not self:
            return
        _world = None
        try:
            if self._run is not None:
                self._run.close()
        finally:
            if self._optimizers is not None:
                self._optimizers.remove()
            for loader in list(self._loaders):
                loader.close()
            group.leave(is_clean=not self._failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._failed = self._failed or kind is not None
        self.close()

    def _say_anywhere(self, text: str) -> None:
        print(f"muster: rank {self.rank}: {text}", file=sys.stderr, flush=True)


def _of_current(method: Callable[Concatenate[World, P], R]) -> Callable[P, R]:
    """Wrap a method of `World` as a function on the current world."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(current(), *args, **kwargs)

    return call


barrier = _of_current(World.barrier)
evaluation = _of_current(World.evaluation)
loader = _of_current(World.loader)
once = _of_current(World.once)
resume = _of_current(World.resume)
wrap = _of_current(World.wrap)
