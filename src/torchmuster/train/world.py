"""The world of a training script: who this process is, and what it needs to train with the others.

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
import os
import sys
import tempfile
import traceback
import uuid
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torchmuster.errors import MusterError, UsageError
from torchmuster.files.layout import RunDir
from torchmuster.model import contract
from torchmuster.model.display.text import render_report, report_of_error
from torchmuster.train import group, rng
from torchmuster.train.barrier import StoreBarrier
from torchmuster.train.batches.loader import Loader, LoaderSettings
from torchmuster.train.batches.stream import StreamLoader
from torchmuster.train.evaluation import Evaluation, EvaluationWatch
from torchmuster.train.exchange import broadcast_bytes, gather_ints
from torchmuster.train.launch import Launcher
from torchmuster.train.objects import Objects
from torchmuster.train.once import OnceError, OncePlace
from torchmuster.train.once import once as once_in
from torchmuster.train.pace import Pace
from torchmuster.train.run import Run, RunSettings
from torchmuster.train.runmetrics import RunMetrics
from torchmuster.train.saves import Saves
from torchmuster.train.sinks import MetricSink, MetricsRecord
from torchmuster.train.snapshot.folder import LocalFolder, open_folder
from torchmuster.train.snapshot.load import load_agreed
from torchmuster.train.snapshot.state import MisfitError, NoGoodSnapshotError, SnapshotError
from torchmuster.train.snapshot.writer import Crew
from torchmuster.train.wrap import unwrap, wrap_sharded, wrap_whole

P = ParamSpec("P")
R = TypeVar("R")

_world: "World | None" = None


def init(
    *,
    seed: int = 0,
    timeout_s: float = group.DEFAULT_TIMEOUT_S,
    device: str | None = None,
) -> "World":
    """Join the world of whatever launcher started this process, or make one of one worker.

    Works under `muster`, `torchrun`, `srun` (one task a worker), `mpiexec` and without a launcher.
    Seeds torch, numpy and `random` with `seed`, alike on all ranks, so that all begin with the same
    weights; `resume` seeds them anew, differently on each rank.

    Args:
        seed: For all generators.
        timeout_s: How long a collective may take, and a wait for a missing rank.
        device: `cpu` or `cuda`; default: CUDA where torch sees a GPU.

    Raises:
        UsageError: The environment contradicts itself.
        WorldError: The world isn't what the launcher promised.
    """
    global _world
    if _world is not None:
        raise UsageError("tm.init() was called twice", fix="call it once and pass the world on")
    _print_own_errors_in_words()
    rng.seed_everything(seed)
    _world = World(group.join(timeout_s=timeout_s, device=device), seed)
    atexit.register(_world.close)
    _world.say(_world.describe())
    return _world


def current() -> "World":
    """Return this process's world; it is made, with `init()`, when there is none yet."""
    return _world if _world is not None else init()


class World:
    """The ranks that train together; made by `init`.

    Attributes:
        rank: Of this process, `0 .. world_size - 1`.
        device: Where this rank computes.
        launcher: Who started it.
        pace: The batch in hand, shared by loader, model and run.
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
        self.pace = Pace()
        self._standing = standing
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._run: Run | None = None
        self._failed = False
        # A store may outlive an attempt (torchrun's does): keys of the last one must not be found.
        self.token = broadcast_bytes(uuid.uuid4().hex.encode(), 0).decode()
        self._store = self.connect()
        self._barrier = StoreBarrier(self._store, rank=self.rank, world_size=self.world_size)

    def describe(self) -> str:
        """Return one line on the world: sizes, device, launcher, interface, timeout."""
        workers = "worker" if self.world_size == 1 else "workers"
        nodes = "node" if self.num_nodes == 1 else "nodes"
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        over = f" over {self._standing.interface}" if self._standing.interface else ""
        return (
            f"{self.world_size} {workers} on {self.num_nodes} {nodes}, {self.device.type},"
            f" {backend}{over}, started by {self.launcher.value},"
            f" timeout {self._standing.timeout_s:g} s"
        )

    @property
    def timeout_s(self) -> float:
        """How long a collective may take, and a wait for a rank."""
        return self._standing.timeout_s

    def connect(self) -> Any:
        """Return one more connection to the group's store: one holds all others up while it waits."""
        return dist.PrefixStore(f"muster/{self.token}", self._standing.connect())

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line on standard error, on rank 0 only."""
        if self.rank == 0:
            with contextlib.suppress(
                OSError
            ):  # the terminal was closed: training has still to be saved
                print(f"muster: {text}", file=sys.stderr, flush=True)

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """Wait until all ranks have come here.

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
        """Move `model` to this rank's device and make it one with the other ranks'.

        The loss must be the mean over the rank's samples: gradients are weighted by the share of
        the global batch, so that they are those of the mean over all of it.

        Args:
            model: Not yet wrapped. Make the optimizer after this call.
            sharded: FSDP2 (`fully_shard`) instead of DistributedDataParallel.
            replicas: With `sharded`: that many replicas, each sharded over its ranks (HSDP).
            compile: Run it through torch.compile.
            settle: Make a throw-away backward before the first step, so that a resumed process sums
                gradients in the same order as one that never stopped (bitwise equality over
                restarts from 3 ranks on).
            options: Passed to DistributedDataParallel or `fully_shard`.
        """
        model = model.to(self.device)
        if compile:
            model.compile()
        if sharded:
            wrapped = wrap_sharded(
                model,
                self.pace,
                device_type=self.device.type,
                num_replicas=replicas,
                options=options,
            )
        else:
            if self.device.type == "cuda":
                options.setdefault("device_ids", [self.device])
            wrapped = wrap_whole(model, self.pace, settle=settle, options=options)
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
            global_batch_size: Samples a step over all ranks: kept when the world changes.
            batch_size: Instead: samples a step on each rank.
            shuffle: In an order of its own for each epoch.
            seed: Of the order and of random augmentation.
            accumulate: Micro-batches a step; gradients meet at the last one.
            drop_last: Leave out a last step that is smaller.
            num_workers: Loader processes of this rank.
            collate_fn: As in torch's DataLoader.
            options: Passed to torch's DataLoader.

        Raises:
            UsageError: Sizes below one, or both batch sizes.
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
        common = {
            "rank": self.rank,
            "world_size": self.world_size,
            "device": self.device,
            "pace": self.pace,
            "collate": collate_fn,
            "options": options,
        }
        loader: Loader
        if isinstance(dataset, torch.utils.data.IterableDataset):
            if shuffle:
                raise UsageError(
                    "an iterable dataset has its own order: shuffle=True has no effect",
                    where="World.loader",
                    fix="shuffle in the dataset, from (seed, epoch)",
                )
            loader = StreamLoader(dataset, settings, compare=_compare, **common)
        else:
            compare = _compare if self.world_size > 1 else None
            loader = Loader(dataset, settings, compare=compare, **common)
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
        """Return this rank's batches of `dataset`, each sample on one rank, and exact metrics.

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
            name: Of the work, unique in `folder`.
            per: `node` or `run`.
            folder: Where the markers lie; default: the node's temporary folder, or the run's.

        Raises:
            OnceError: The one that did the work failed: on all ranks that wait for it.
        """
        if per not in ("node", "run"):
            raise UsageError(f"per={per!r}: `node` or `run`", where="World.once")
        place = folder or (self._node_folder() if per == "node" else self._run_folder())
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
        keep: int = 3,
        asynchronous: bool = True,
        when_busy: str = "wait",
        on_save_error: str = "raise",
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
            folder: A path, or a URL that fsspec knows; default: `snapshots/` in the run directory of
                `muster`, else in the working directory.
            every_steps: Save after every so many steps.
            every_s: Save after so many seconds, looked at every `log_every` steps; None: never.
            every_epoch: Save at the end of every epoch.
            keep: How many snapshots stay.
            asynchronous: Write beside the loop; it waits for the copy only.
            when_busy: `wait` for a save that still runs, or `skip` the new one.
            on_save_error: `raise` when a save failed, or `warn` and train on.
            save_timeout_s: How long rank 0 waits for the other ranks' parts.
            log_every: Steps between two reductions of the metrics.
            time_limit_s: Stop and save in time before so many seconds have passed. Under Slurm the
                job's own end is obeyed as well.
            tensorboard: A folder for TensorBoard's files.
            sinks: Other places for metrics.
            objects: `model=`, `optimizer=`, and all else with state_dict() and load_state_dict().

        Raises:
            UsageError: An object can't be saved, or an option isn't one.
            SnapshotError: There are snapshots, and none fits or none is good.
        """
        if when_busy not in ("wait", "skip") or on_save_error not in ("raise", "warn"):
            raise UsageError(
                "when_busy is `wait` or `skip`, on_save_error `raise` or `warn`",
                where=f"when_busy={when_busy!r}, on_save_error={on_save_error!r}",
            )
        for name, value in (("every_steps", every_steps), ("keep", keep), ("log_every", log_every)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, below one", where="World.resume")
        if self._run is not None:
            raise UsageError("resume() was called twice", fix="put all objects into one call")
        things = Objects(objects)
        things.check()
        crew = self._crew(folder or self._default_folder(), keep, save_timeout_s, things)
        settings = RunSettings(
            every_steps=every_steps,
            every_s=every_s,
            every_epoch=every_epoch,
            asynchronous=asynchronous,
            on_save_error=on_save_error,
            log_every=log_every,
            time_limit_s=time_limit_s,
        )
        first = self.rank == 0
        chosen = list(sinks or []) if first else []
        if tensorboard and first:
            from torchmuster.train.sinks import TensorBoard

            chosen.append(TensorBoard(tensorboard))
        metrics = RunMetrics(
            is_first=first,
            device=self.device,
            record=MetricsRecord(self._record_path(crew)),
            sinks=chosen,
        )
        saves = Saves(things, crew, when_busy=when_busy)
        run = Run(self, things, data, settings, saves, metrics)
        self._begin(run, crew, things, metrics.record)
        self._run = run
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
            for loader in list(self._loaders):
                loader.close()
            group.leave(is_clean=not self._failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._failed = self._failed or kind is not None
        self.close()

    # Beginning a run.

    def _begin(self, run: Run, crew: Crew, things: Objects, record: MetricsRecord) -> None:
        reads = self.rank == 0 or crew.copies
        if reads:
            crew.folder.tidy(crew.generation)
        loaded = load_agreed(crew.folder, rank=self.rank, reads=reads, report=_report)
        if loaded is None:
            if self.rank == 0:
                _refuse_to_forget(record, crew.folder.url)
            self.say(f"no snapshot in {crew.folder.url}: beginning at step 0")
        else:
            things.load(loaded, crew.folder)
        run.begin(loaded, self.seed)
        if loaded is not None:
            m = loaded.manifest
            self.say(f"resuming after step {m.step} (epoch {m.epoch}) from {crew.folder.url}")

    def _crew(self, url: str, keep: int, timeout_s: float, things: Objects) -> Crew:
        """Find out who writes: agree on a generation, and see whether all nodes see one folder."""
        folder = open_folder(url)
        leads = self.local_rank == 0
        try:
            newest = max(
                row[0] for row in gather_ints([folder.newest_generation() if leads else 0])
            )
            generation = newest + 1
            if self.rank == 0:
                generation = folder.claim_generation(at_least=generation)
        except (OSError, SnapshotError) as error:
            why = error.why if isinstance(error, SnapshotError) else error.strerror
            raise SnapshotError(
                "the folder of the snapshots can't be used",
                where=folder.url,
                why=why,
                fix="choose another place with folder=...",
            ) from error
        generation = gather_ints([generation])[0][0]
        sees = not leads or folder.exists_here(f"generation-{generation}")
        is_shared = all(row[0] for row in gather_ints([int(sees)]))
        if not is_shared:
            self._allow_copies(folder.url, things)
            if leads and not sees:
                folder.claim_generation(at_least=generation)
        return Crew(
            folder=folder,
            store=self.connect(),
            rank=self.rank,
            world_size=self.world_size,
            generation=generation,
            keep=keep,
            timeout_s=timeout_s,
            copies=leads and not is_shared,
        )

    def _allow_copies(self, url: str, things: Objects) -> None:
        if things.is_sharded:
            raise MisfitError(
                "the nodes don't share the folder of the snapshots, and the model is sharded",
                where=url,
                why="each node would hold only its own ranks' part",
                fix="choose a folder on a shared file system, or a URL such as s3://...",
            )
        self.say(f"the nodes don't share {url}: each keeps a whole copy of every snapshot")

    def _default_folder(self) -> str:
        run_dir = os.environ.get(contract.RUN_DIR_VARIABLE)
        return RunDir(run_dir or os.getcwd()).snapshots

    def _record_path(self, crew: Crew) -> str:
        run_dir = os.environ.get(contract.RUN_DIR_VARIABLE)
        if run_dir:
            return RunDir(run_dir).training
        is_local = isinstance(crew.folder, LocalFolder)
        return os.path.join(crew.folder.url if is_local else os.getcwd(), "training.jsonl")

    def _node_folder(self) -> str:
        scratch = os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
        run = self._standing.launch.run_id
        if run in ("", "none"):  # torchrun's own default is `none`, for every job
            run = self.token
        safe = "".join(c if c.isalnum() else "-" for c in run)
        base = os.path.join(scratch, f"muster-once-{os.getuid()}-{safe}")
        try:
            os.makedirs(base, mode=0o700, exist_ok=True)
            owner = os.stat(base).st_uid
        except OSError as error:
            raise OnceError("no folder for markers", where=base, why=error.strerror) from error
        if owner != os.getuid():  # a shared temporary folder: anyone could have made it
            raise OnceError(
                "the folder for markers belongs to somebody else",
                where=base,
                why=f"its owner is user {owner}",
                fix="name another one: tm.once(..., folder=...)",
            )
        # Nodes that are simulated on one machine have one temporary folder, and each its own work.
        return os.path.join(base, f"node-{self.node_rank}")

    def _run_folder(self) -> str:
        return os.path.join(self._default_folder(), "once")

    def _say_anywhere(self, text: str) -> None:
        print(f"muster: rank {self.rank}: {text}", file=sys.stderr, flush=True)


def _of_current(method: Callable[Concatenate[World, P], R]) -> Callable[P, R]:
    """Return a method of `World` as a function on the current world."""

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


def _compare(value: int) -> list[int]:
    return [row[0] for row in gather_ints([value])]


def _refuse_to_forget(record: MetricsRecord, folder: str) -> None:
    """Raise where an earlier attempt of this run has saved, and nothing of it can be found."""
    if os.environ.get(contract.ATTEMPT_VARIABLE, "0") == "0":
        return
    step = record.last_saved(folder)
    if step is not None:
        raise NoGoodSnapshotError(
            f"the snapshot of step {step} has vanished",
            where=folder,
            why="an earlier attempt of this run has saved it there",
            fix="is the file system mounted? `muster restart` resumes when it is back; a new run starts over at step 0",
        )


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_own_errors_in_words() -> None:
    """Print our own errors without a traceback, and remember that an exception is on its way out.

    NCCL's group must then not be destroyed in order: it would wait for the other ranks.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _world is not None:
            _world._failed = True
        if isinstance(error, MusterError):
            print(_in_words(error, trace), file=sys.stderr, end="", flush=True)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


def _in_words(error: MusterError, trace: TracebackType | None) -> str:
    """Return the report on an error, with the line of the script that led to it."""
    ours = os.path.dirname(os.path.dirname(__file__))
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]
    script = [(name, line) for name, line in frames if not name.startswith((ours, "<"))]
    report = report_of_error(error)
    if script:
        line = f"{script[-1][0]}:{script[-1][1]}"
        report = replace(report, at=f"{line}, {report.at}" if report.at else line)
    return render_report(report)
