"""Numbers of the machines go beside the script's own, each sample once."""

import json

import pytest

import torchmuster.train as tm
from torchmuster.core.files.layout import RunDir
from torchmuster.train.sinks import system_values

SAMPLE = {
    "cpus": [1.0, 3.0],
    "rss_mib": [100, 300],
    "gpu_percent": [90, None],
    "steps_per_s": [20.0, 19.0],
    "data_s": [1.0, 4.0],
    "forward_s": [1.0, 1.0],
    "rest_s": [8.0, 5.0],
    "wait_s": [3.0, 0.0],
}


class Kept:
    def __init__(self):
        self.written, self.is_closed = [], False

    def write(self, step, values):
        self.written.append((step, dict(values)))

    def close(self):
        self.is_closed = True


def append(path, *rows):
    with open(path, "a") as file:
        file.write("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def test_a_sample_is_means_over_the_ranks():
    assert system_values(SAMPLE) == {
        "system/cpu_cores": 2.0,
        "system/memory_usage_megabytes": pytest.approx(209.7152),
        "system/gpu_utilization_percentage": 90.0,
        "system/steps_per_second": 19.0,
        "system/wait_ratio": 0.15,
    }


@pytest.mark.parametrize("sample", [{}, {"cpus": None}, {"cpus": ["x", None]}, {"rest_s": [0.0]}])
def test_what_nobody_tells_is_left_out(sample):
    assert system_values(sample) == {}


def test_each_sample_is_passed_on_once_and_the_sink_is_closed(tmp_path):
    run_dir, kept = RunDir(str(tmp_path)), Kept()
    sink = tm.SystemMetrics(kept, run_dir.path)
    sink.write(1, {"loss": 1.0})
    append(run_dir.samples, SAMPLE)
    append(run_dir.training, {"event": "saved", "saved": 50}, {"event": "metrics", "step": 60})
    sink.write(2, {"loss": 0.9})
    sink.write(3, {"loss": 0.8})
    append(run_dir.samples, {**SAMPLE, "cpus": [4.0]}, "{half")
    sink.write(4, {"loss": 0.7})
    sink.close()
    (_, first), (_, second), (_, third), (_, fourth) = kept.written
    assert first == {"loss": 1.0}
    assert (second["loss"], second["system/cpu_cores"], second["system/snapshot_step"]) == (
        0.9,
        2.0,
        50.0,
    )
    assert third == {"loss": 0.8}
    assert fourth["system/cpu_cores"] == 4.0
    assert kept.is_closed


def test_without_muster_the_sink_gets_what_it_got_before(monkeypatch):
    monkeypatch.delenv("TORCHMUSTER_RUN_DIR", raising=False)
    kept = Kept()
    tm.SystemMetrics(kept).write(1, {"loss": 1.0})
    assert kept.written == [(1, {"loss": 1.0})]
