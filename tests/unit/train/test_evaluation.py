"""Evaluation: every sample counts once at any world size, and nobody waits for anybody."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from kit.command import muster_env, ran
from torchmuster.errors import UsageError
from torchmuster.train.batches.loader import DatasetError
from torchmuster.train.evaluation import Evaluation, EvaluationWatch

pytestmark = pytest.mark.usefixtures("alone")
SCRIPT = Path(__file__).parent / "evaluation_script.py"


class Watched(EvaluationWatch):
    """Notes what the evaluation tells the run."""

    def __init__(self):
        self.notes = []

    @contextmanager
    def evaluating(self, generators):
        self.notes.append("begin")
        yield
        self.notes.append("end")

    def between_batches(self):
        self.notes.append("batch")

    def before_collective(self):
        self.notes.append("collective")


def evaluation_of(dataset, *, batch_size=2, models=(), watch=None, say=print):
    watch = watch or EvaluationWatch()
    return Evaluation(
        dataset,
        batch_size=batch_size,
        num_workers=0,
        device=torch.device("cpu"),
        models=lambda: list(models),
        watch=lambda: watch,
        say=say,
        collate=None,
        options={},
    )


def evaluate(folder, *launcher):
    """Run the script; return what each rank wrote."""
    folder.mkdir()
    line = [sys.executable, *map(str, launcher), str(SCRIPT), str(folder)]
    ended = ran(line, limit_s=120, env=muster_env(folder, OMP_NUM_THREADS="1"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def test_three_workers_with_uneven_batches_measure_what_one_does(tmp_path):
    muster = ("-m", "torchmuster", "run", "--max-restarts", 0, "--nproc-per-node", 3)
    ranks = evaluate(tmp_path / "three", *muster)
    (single,) = evaluate(tmp_path / "one")
    assert len(ranks) == 3
    assert [rank["5"]["batches"] for rank in ranks] == [[1, 1], [2, 2], [2, 2]]
    assert [len(rank["2"]["batches"]) for rank in ranks] == [0, 2, 2]
    for size, expected in single.items():
        for rank in ranks:
            for found, reference in zip(rank[size]["rounds"], expected["rounds"], strict=True):
                assert found["count"] == int(size)
                assert found == pytest.approx(reference, rel=1e-12)
                assert found == ranks[0][size]["rounds"][0]  # on all ranks the same bits


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10])
def test_metrics_are_means_over_samples_however_they_are_batched(batch_size):
    values = torch.arange(7.0, dtype=torch.float64) ** 2
    test = evaluation_of(TensorDataset(values), batch_size=batch_size)
    sizes = []
    for (x,) in test:
        test.add(each=x, mean=x.mean(), number=x.mean().item(), large=x > 5)
        sizes.append(len(x))
    assert len(sizes) == len(test) == -(-7 // batch_size)
    assert test.result() == pytest.approx(
        {"each": 13.0, "mean": 13.0, "number": 13.0, "large": 4 / 7, "count": 7}
    )


def test_each_evaluation_begins_anew():
    test = evaluation_of(TensorDataset(torch.arange(4.0)))
    for factor in (1.0, 10.0):
        for (x,) in test:
            test.add(x=factor * x)
        assert test.result() == {"x": 1.5 * factor, "count": 4}
    assert test.result() == {"x": 15.0, "count": 4}  # asking again changes nothing


def test_an_evaluation_that_was_left_early_is_refused():
    test = evaluation_of(TensorDataset(torch.arange(5.0)))
    for (x,) in test:
        test.add(x=x)
        break
    with pytest.raises(UsageError) as caught:
        test.result()
    assert caught.value.what == "2 of 5 samples were evaluated"
    assert caught.value.where == "Evaluation.result"
    assert caught.value.why == "a rank left the loop early or did not run it"
    assert caught.value.fix == "run the loop to its end on every rank"


def test_adding_outside_of_the_loop_is_refused():
    test = evaluation_of(TensorDataset(torch.arange(5.0)))
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            test.add(x=1.0)
        assert caught.value.what == (
            "add() was called outside the loop over the evaluation's batches"
        )
        for _batch in test:  # also after a loop that was left
            break


def test_a_metric_named_count_is_refused():
    test = evaluation_of(TensorDataset(torch.arange(5.0)))
    batches = iter(test)
    next(batches)
    with pytest.raises(UsageError, match="`count` is the number of samples already"):
        test.add(count=1.0)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (0,)])
def test_a_tensor_that_is_neither_a_mean_nor_one_a_sample_is_refused(shape):
    test = evaluation_of(TensorDataset(torch.arange(4.0)))
    batches = iter(test)
    next(batches)
    with pytest.raises(UsageError, match="the metric `x` is not one number but a tensor of shape"):
        test.add(x=torch.zeros(shape))


def test_a_batch_size_below_one_and_an_empty_dataset_are_refused():
    with pytest.raises(UsageError, match="batch_size is 0, below one"):
        evaluation_of(TensorDataset(torch.arange(4.0)), batch_size=0)
    with pytest.raises(DatasetError, match="the dataset is empty"):
        evaluation_of([])


@pytest.mark.parametrize(
    ("layer", "differs"), [(nn.Dropout(), True), (nn.BatchNorm1d(2), True), (nn.ReLU(), False)]
)
def test_a_model_that_is_unlike_in_training_is_noted(layer, differs):
    said = []
    model = nn.Sequential(nn.Linear(2, 2), layer)
    test = evaluation_of(TensorDataset(torch.arange(4.0)), models=[model], say=said.append)
    next(iter(test))
    assert said == ["evaluating a model in training mode: call model.eval() first"] * differs
    model.eval()
    next(iter(test))
    assert len(said) == differs


def test_the_run_is_told_of_every_batch_and_of_the_reduction():
    watch = Watched()
    test = evaluation_of(TensorDataset(torch.arange(3.0)), watch=watch)
    for _ in test:
        pass
    test.result()
    assert watch.notes == ["begin", "batch", "batch", "end", "collective"]
