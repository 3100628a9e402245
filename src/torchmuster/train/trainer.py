"""A ready-made training loop, equivalent to the one in the README.

Override `training_step` and `validation_step` if a batch isn't a pair of inputs and targets.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchmuster.errors import UsageError
from torchmuster.train.precision import Precision
from torchmuster.train.world import World, init

# Called with outputs and targets; returns `(batch,)`, one value per sample, or a scalar, their
# mean.
Metric = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Options of a trainer.

    Attributes:
        epochs: Number of epochs of the whole run, over all its attempts.
        global_batch_size: Samples per step over all ranks.
        eval_batch_size: Samples per batch and rank in evaluation; default: the global batch size.
        precision: `fp32`, `bf16` or `fp16`.
        max_norm: Clip gradients to this 2-norm.
        sharded: FSDP2 instead of DistributedDataParallel.
        num_workers: Number of loader processes per rank.
        eval_every: Epochs between evaluations; the last epoch is always evaluated.
        resume: Options of `World.resume`, such as `folder` and `every_steps`.
        loader: Options of `World.loader`.
    """

    epochs: int
    global_batch_size: int
    eval_batch_size: int | None = None
    shuffle: bool = True
    seed: int = 0
    accumulate: int = 1
    precision: str = "fp32"
    max_norm: float | None = None
    sharded: bool = False
    num_workers: int = 0
    eval_every: int = 1
    resume: Mapping[str, Any] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains a model on any number of nodes, resuming exactly.

        world = tm.init(seed=0)
        trainer = tm.Trainer(
            Net(), functools.partial(torch.optim.AdamW, lr=3e-4), F.cross_entropy,
            tm.TrainerOptions(epochs=10, global_batch_size=256), world=world,
        )
        results = trainer.fit(train_set, test_set)

    Attributes:
        world: The ranks that train together.
        model: Wrapped for this world.
        optimizer: Created after wrapping.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        loss: Callable[[Any, Any], torch.Tensor],
        options: TrainerOptions,
        *,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        world: World | None = None,
    ) -> None:
        """Wrap the model and create the optimizer.

        Args:
            model: Not yet wrapped.
            optimizer: Called with the parameters; returns an optimizer.
            loss: Called with outputs and targets; returns the mean over the batch.
            options: Sizes, precision and so on.
            scheduler: Called with the optimizer; returns a scheduler, which steps after every
                optimizer step.
            metrics: Functions of outputs and targets for evaluation, by name.
            world: From `init`; default: a new one.

        Raises:
            UsageError: An option is out of range, or `optimizer` is an optimizer instead of a
                function.
        """
        if isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "the trainer makes the optimizer itself, after wrapping the model",
                where="Trainer(optimizer=...)",
                fix="functools.partial(torch.optim.AdamW, lr=3e-4)",
            )
        if options.epochs < 0 or options.eval_every < 1:
            raise UsageError(
                f"epochs={options.epochs}, eval_every={options.eval_every}",
                where="TrainerOptions",
                fix="epochs must not be negative, eval_every at least one",
            )
        self.world = world or init(seed=options.seed)
        self.options = options
        self.model = self.world.wrap(model, sharded=options.sharded)
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self.precision = Precision(self.world, options.precision, max_norm=options.max_norm)
        self._loss = loss
        self._metrics = dict(metrics or {})

    def fit(self, train_set: Any, eval_set: Any = None) -> dict[str, float]:
        """Train, resuming from an earlier attempt; return the metrics of the last evaluation."""
        options, world = self.options, self.world
        data = world.loader(
            train_set,
            global_batch_size=options.global_batch_size,
            shuffle=options.shuffle,
            seed=options.seed,
            accumulate=options.accumulate,
            num_workers=options.num_workers,
            **options.loader,
        )
        objects = {"model": self.model, "optimizer": self.optimizer, "precision": self.precision}
        if self.scheduler is not None:
            objects["scheduler"] = self.scheduler
        run = world.resume(data=data, **objects, **options.resume)
        results: dict[str, float] = {}
        for epoch in run.epochs(options.epochs):
            self.model.train()
            for batch in data:
                with self.precision.autocast():
                    loss = self.training_step(batch)
                self.precision.backward(loss)
                if data.ends_step:
                    self._step()
                run.step(loss=loss)
            is_last = epoch == options.epochs - 1
            if eval_set is not None and (is_last or (epoch + 1) % options.eval_every == 0):
                results = self.evaluate(eval_set)
                run.report(**{f"eval_{name}": value for name, value in results.items()})
        if not results and eval_set is not None:  # the run had finished before
            results = self.evaluate(eval_set)
        return results

    @torch.no_grad()
    def evaluate(self, eval_set: Any) -> dict[str, float]:
        """Return the metrics over all of `eval_set`, every sample counted once, on all ranks."""
        options = self.options
        test = self.world.evaluation(
            eval_set,
            batch_size=options.eval_batch_size or options.global_batch_size,
            num_workers=options.num_workers,
        )
        was_training = self.model.training
        self.model.eval()
        for batch in test:
            with self.precision.autocast():
                test.add(**self.validation_step(batch))
        self.model.train(was_training)
        results = test.result()
        test.close()
        return results

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the mean loss over this rank's samples of a batch."""
        inputs, targets = batch
        return self._loss(self.model(inputs), targets)

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return a batch's metrics: `(batch,)`, one value per sample, or a scalar, their mean."""
        inputs, targets = batch
        outputs = self.model(inputs)
        values = {name: metric(outputs, targets) for name, metric in self._metrics.items()}
        return {"loss": self._loss(outputs, targets), **values}

    def _step(self) -> None:
        self.precision.step(self.optimizer)
        if self.scheduler is not None:
            self.scheduler.step()
