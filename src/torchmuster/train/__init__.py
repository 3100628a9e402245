"""The training library: exact resume, exact data order, correct metrics, safe snapshots.

    import torchmuster.train as tm

    model = tm.wrap(Net())
    data = tm.loader(train_set, global_batch_size=256, shuffle=True)
    run = tm.resume(model=model, optimizer=optimizer, data=data)
    for epoch in run.epochs(10):
        for x, y in data:
            ...

`tm.wrap`, `tm.loader`, `tm.evaluation`, `tm.once`, `tm.barrier` and `tm.resume` are the methods of the
current world; the first call makes it, or `tm.init(...)` does, with options. Works under `muster`, `torchrun`, `srun`, `mpiexec` and with no launcher at all. Needs torch and numpy:
`pip install 'torchmuster[train]'`.
"""

from importlib.util import find_spec as _find_spec

# Before the imports that need them.
if _missing := [n for n in ("torch", "numpy", "fsspec") if _find_spec(n) is None]:
    raise ImportError(
        f"torchmuster.train needs {', '.join(_missing)}, which this interpreter doesn't have:"
        " pip install 'torchmuster[train]'"
    )

from torchmuster.train.batches.loader import DatasetError, Loader
from torchmuster.train.evaluation import Evaluation
from torchmuster.train.finite import NotFiniteError
from torchmuster.train.group import WorldError
from torchmuster.train.once import OnceError
from torchmuster.train.precision import Precision
from torchmuster.train.run import Run
from torchmuster.train.sinks import MetricSink, MLflow, SystemMetrics, TensorBoard, WeightsAndBiases
from torchmuster.train.snapshot.state import SnapshotError
from torchmuster.train.trainer import Trainer, TrainerOptions
from torchmuster.train.verify.watch import DiffersError
from torchmuster.train.world import (
    World,
    barrier,
    current,
    evaluation,
    init,
    loader,
    once,
    resume,
    wrap,
)

__all__ = [
    "DatasetError",
    "DiffersError",
    "Evaluation",
    "Loader",
    "MLflow",
    "MetricSink",
    "NotFiniteError",
    "OnceError",
    "Precision",
    "Run",
    "SnapshotError",
    "SystemMetrics",
    "TensorBoard",
    "Trainer",
    "TrainerOptions",
    "WeightsAndBiases",
    "World",
    "WorldError",
    "barrier",
    "current",
    "evaluation",
    "init",
    "loader",
    "once",
    "resume",
    "wrap",
]
