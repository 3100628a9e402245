"""Which variables an import has read."""

import os

from torchmuster.multirun.server.modules import read_by_imports, recording_reads


def test_names_that_are_asked_for_are_noted_and_copies_are_no_question(monkeypatch):
    monkeypatch.setenv("MINE_A", "1")
    monkeypatch.setenv("MINE_B", "1")
    kind = type(os.environ)
    with recording_reads() as read:
        dict(os.environ)
        os.environ.copy()
        list({**os.environ}.items())
        list(os.environ.items())
        assert read == set()
        os.environ.get("SEED")
        assert "SEED_2" not in os.environ
        os.getenv("SEED_3")
        assert [os.environ[name] for name in os.environ if name == "MINE_B"] == ["1"]
    assert read == {"SEED", "SEED_2", "SEED_3", "MINE_B"}
    assert type(os.environ) is kind


def test_what_native_libraries_read_counts_and_what_is_the_terminal_s_does_not():
    counts = {"OMP_NUM_THREADS": "1", "HOME": "/h"}
    given = {**counts, "TERM": "xterm", "SEED": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert read_by_imports(given, {"TERM", "HOME", "CUDA_VISIBLE_DEVICES"}) == counts
