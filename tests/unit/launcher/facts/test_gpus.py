import pytest

from torchmuster.core.node.kernel import visible_gpus


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        ("", []),
        ("0", ["0"]),
        ("2, 0 ,1", ["2", "0", "1"]),
        ("GPU-8f2a,MIG-1", ["GPU-8f2a", "MIG-1"]),
        ("0,-1,1", ["0"]),  # an id that is not valid hides all that follow
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_the_variable_names_the_gpus_in_its_order(monkeypatch, chosen, ids):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    assert visible_gpus() == ids


def test_without_the_variable_gpus_are_numbered_from_0(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = visible_gpus()

    assert found == [str(index) for index in range(len(found))]


def test_gpus_of_other_files_and_another_environment_are_counted_there(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, str(tmp_path)) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,none,0"}, str(tmp_path)) == ["1"]
