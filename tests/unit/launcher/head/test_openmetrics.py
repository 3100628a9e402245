"""A run in the words of Prometheus, as its own reference parser reads them."""

import json
import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from torchmuster.launcher.head.parts import NewestTraining, render
from torchmuster.launcher.model.progress import RankSample

SAMPLE = RankSample(
    time="2026-11-23T12:00:00.000Z",
    attempt=1,
    over_s=10.0,
    nodes=("n1", 'n"2\\\n'),
    states=("R", ""),
    report_ages_s=(0.5, 0.5),
    steps=(40, 41),
    steps_here=(10, 11),
    ages_s=(0.1, 3.0),
    phases=("compute", "forward"),
    steps_per_s=(2.0, 2.0),
    median_s=(0.5, 0.5),
    data_s=(1.0, 2.0),
    forward_s=(1.0, 2.0),
    rest_s=(8.0, 0.0),
    wait_s=(5.0, 0.0),
    cpus=(1.5, None),
    rss_mib=(300, None),
    gpu_percent=(87, None),
    gpu_mib=(1024, None),
)


@pytest.fixture
def training(tmp_path):
    return NewestTraining(str(tmp_path / "training.jsonl"))


def write(training, *events):
    with open(training.path, "a") as file:
        file.writelines(
            event if isinstance(event, str) else json.dumps(event) + "\n" for event in events
        )


def read(text):
    """Return {(name, labels): value}, as the reference parser of OpenMetrics reads it."""
    families = list(text_string_to_metric_families(text))
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_ranks_are_told_in_base_units(training):
    found = read(render("run-1", 2, SAMPLE, training))
    first, second = (("node", "n1"), ("rank", "0")), (("node", 'n"2\\\n'), ("rank", "1"))
    assert found["torchmuster_run_info", ("run_id", "run-1")] == 1
    assert found["torchmuster_attempts_total",] == 2
    assert found["torchmuster_rank_up", *first] == 1
    assert found["torchmuster_rank_up", *second] == 0
    assert found["torchmuster_rank_step", *second] == 41
    assert found["torchmuster_rank_wait_ratio", *first] == 0.5
    assert found["torchmuster_rank_wait_ratio", *second] == 0
    assert found["torchmuster_rank_resident_memory_bytes", *first] == 300 << 20
    assert found["torchmuster_rank_gpu_utilization_ratio", *first] == pytest.approx(0.87)
    assert ("torchmuster_rank_cpu_cores", *second) not in found


def test_a_plain_script_has_no_steps_and_a_run_between_attempts_no_ranks(training):
    plain = RankSample(
        time="", attempt=0, over_s=1.0, nodes=("n1",), states=("S",), report_ages_s=(0.0,)
    )
    names = {key[0] for key in read(render("r", 1, plain, training))}
    assert names == {"torchmuster_run_info", "torchmuster_attempts_total", "torchmuster_rank_up"}
    names = {key[0] for key in read(render("r", 1, None, training))}
    assert names == {"torchmuster_run_info", "torchmuster_attempts_total"}


def test_the_scripts_own_metrics_are_the_newest_also_when_they_are_no_numbers(training):
    write(training, {"event": "metrics", "step": 1, "values": {"loss": 3.0, 'a"b': 1}})
    training.read()
    write(
        training,
        {"event": "metrics", "step": 2, "values": {"loss": float("nan"), "top": float("inf")}},
        {"event": "saved", "step": 2, "saved": 1},
    )
    training.read()
    found = read(render("r", 1, None, training))
    assert math.isnan(found["torchmuster_training", ("name", "loss")])
    assert found["torchmuster_training", ("name", "top")] == math.inf
    assert found["torchmuster_training", ("name", 'a"b')] == 1
    assert found["torchmuster_training_step",] == 2
    assert found["torchmuster_snapshot_step",] == 1


def test_a_record_that_is_half_written_or_no_record_changes_nothing(training):
    training.read()
    write(training, '{"event":"metrics","step":1,"val')
    training.read()
    assert training.values == {}
    write(
        training, 'ues":{"loss":1.0}}\n', "[1]\n", "no json\n", '{"event":"metrics","values":3}\n'
    )
    training.read()
    assert (training.step, training.values) == (1, {"loss": 1.0})


def test_a_script_with_any_number_of_names_does_not_fill_the_memory(training):
    write(training, {"event": "metrics", "step": 1, "values": {f"m{n}": 1.0 for n in range(1000)}})
    training.read()
    assert len(training.values) == 200
