"""How much memory this node's control groups allow."""

import pytest

from torchmuster.launcher.facts import collect


@pytest.mark.parametrize(
    ("counted", "limit"),
    [("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes")],
)
def test_the_smallest_limit_above_us_counts(monkeypatch, tmp_path, counted, limit):
    for number, text in enumerate(("max", "4096", "8192")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / limit).write_text(f"{text}\n")
    files = [str(tmp_path / str(number) / counted) for number in range(3)]
    monkeypatch.setattr(collect, "counter_files", lambda: files)
    assert collect.memory_limit() == 4096
