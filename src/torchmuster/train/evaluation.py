"""Evaluation where every sample counts once, at any world size.

The samples are split among the ranks without padding, so shares may differ or be empty. Nothing in
the loop is a collective, so uneven ranks can't hang. (Only the forward of a sharded model is one:
there a rank
without a batch left repeats a sample with weight 0.) Sums and counts meet in one reduction at the
end.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Sampler

from torchmuster.errors import UsageError
from torchmuster.train import rng
from torchmuster.train.batches import loader
from torchmuster.train.batches.order import split
from torchmuster.train.meter import Meter, Number, means_of
from torchmuster.train.preempt import fork_quietly
from torchmuster.train.wrap import is_sharded, reshard

_COUNT = "muster/count"  # a name that no metric of a script has
_UNLIKE_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


class Evaluation:
    """This rank's batches of a dataset, and the metrics over all of it; see `World.evaluation`.

    test = world.evaluation(test_set, batch_size=256)
    model.eval()
    with torch.no_grad():
        for x, y in test:
            logits = model(x)
            test.add(loss=F.cross_entropy(logits, y), accuracy=logits.argmax(1) == y)
    print(test.result())            # {"loss": ..., "accuracy": ..., "count": 10000}
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        num_workers: int,
        device: torch.device,
        models: Callable[[], list[nn.Module]],
        watch: Callable[[], Any],
        say: Callable[[str], None],
        collate: Callable[[list[Any]], Any] | None,
        options: dict[str, Any],
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}, below one", where="World.evaluation")
        self.num_samples = loader.num_samples_of(dataset)
        self._device = device
        self._models = models
        self._watch = watch
        self._say = say
        self._meter = Meter()
        self._count = 0
        self._size = 0
        begin, end = split(self.num_samples, dist.get_world_size(), dist.get_rank())
        ranges = [(at, min(at + batch_size, end)) for at in range(begin, end, batch_size)]
        fetch = loader.KeyedFetch(dataset, 0, collate)
        self._weight = 0
        largest = math.ceil(self.num_samples / dist.get_world_size())
        self._ranges = _Ranges(ranges, most=math.ceil(largest / batch_size))
        self._batches = loader.open_batches(fetch, self._ranges, num_workers, options)

    def __len__(self) -> int:
        """Return the number of batches of this rank; another rank may have one more or less."""
        return len(self._ranges)

    def __iter__(self) -> Iterator[Any]:
        """Reset the metrics and yield this rank's batches."""
        self._meter.clear()
        self._count = 0
        # The forward of a sharded model is a collective, so all ranks must make equally many.
        self._ranges.evens_out = any(is_sharded(model) for model in self._models())
        for model in self._models():
            _share_buffers(model)
            if model.training and any(isinstance(m, _UNLIKE_IN_TRAINING) for m in model.modules()):
                self._say("evaluating a model in training mode: call model.eval() first")
        with fork_quietly():
            batches = iter(self._batches)
        return self._iterate(batches)

    def _iterate(self, batches: Iterator[Any]) -> Iterator[Any]:
        watch = self._watch()
        # A snapshot made in here belongs to the step before, with the generators of that moment.
        with watch.evaluating(rng.capture()):
            try:
                for number, (ids, batch) in enumerate(batches):
                    watch.between_batches()
                    self._size = len(ids)
                    self._weight = len(ids) if number < len(self._ranges) else 0
                    self._count += self._weight
                    yield loader.on_device(batch, self._device)
            finally:
                self._size = 0
                for model in self._models():
                    reshard(model)

    def add(self, **values: Number | torch.Tensor) -> None:
        """Add metrics of the current batch: a scalar is a mean, `(batch,)` one value per sample.

        Raises:
            UsageError: There is no current batch, or a tensor has another shape.
        """
        if not self._size:
            raise UsageError(
                "add() was called outside the loop over the evaluation's batches",
                where="Evaluation.add",
            )
        if "count" in values:
            raise UsageError(
                "the metric `count` is the number of samples already",
                where="Evaluation.add",
                fix="give it another name",
            )
        means = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == self._size:
                value = value.to(torch.float64).mean()  # noqa: PLW2901
            means[name] = value
        self._meter.add(means, self._weight)

    def result(self) -> dict[str, float]:
        """Return the means over all samples, and `count`; the same on all ranks; a collective.

        Raises:
            UsageError: The ranks together have not counted every sample exactly once.
        """
        self._watch().before_collective()
        self._meter.add({_COUNT: self._count}, 1.0)
        totals = self._meter.totals(torch.device("cpu"))
        count = int(totals.pop(_COUNT)[0])
        if count != self.num_samples:
            raise UsageError(
                f"{count} of {self.num_samples} samples were evaluated",
                where="Evaluation.result",
                why="a rank left the loop early or did not run it",
                fix="run the loop to its end on every rank",
            )
        self._count = 0
        return {**means_of(totals), "count": count}

    def close(self) -> None:
        """End the worker processes."""
        loader.close_batches(self._batches)


class EvaluationWatch:
    """Callbacks of a run around an evaluation; these do nothing."""

    def evaluating(self, generators: dict[str, Any]) -> Any:
        """Return the context of the loop; `generators` holds the random states before it."""
        return nullcontext()

    def between_batches(self) -> None:
        """Called before each batch."""

    def before_collective(self) -> None:
        """Called before the reduction at the end."""


class _Ranges(Sampler[loader.Request]):
    """Indices of this rank's batches; `evens_out` repeats a sample so that ranks' counts agree."""

    def __init__(self, ranges: list[tuple[int, int]], *, most: int) -> None:
        self.evens_out = False
        self._ranges = ranges
        self._most = most

    def __iter__(self) -> Iterator[loader.Request]:
        for begin, end in self._ranges:
            yield 0, list(range(begin, end))
        for _ in range(self._most - len(self._ranges) if self.evens_out else 0):
            yield 0, [0]

    def __len__(self) -> int:
        return len(self._ranges)


def _share_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers to all ranks, once.

    DDP would do so in every forward, and hang on a rank that has no batch left.
    """
    if dist.get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
