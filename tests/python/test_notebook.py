"""A real notebook: the cells of docs/python.md, and one that fails, is fixed and runs again."""

import re

import pytest

from kit.command import SOURCE

PAGE = SOURCE.parent / "docs" / "python.md"
CELLS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)

BROKEN = """\
import os, pathlib, time
import torchmuster
factor, printed = 7, pathlib.Path("printed").resolve()

def work(x):
    if os.environ["RANK"] == "0":
        print("here", os.environ["RANK"], flush=True)
        printed.touch()
        time.sleep(600)  # ended with the attempt
    while not printed.exists():  # else rank 1 may end the attempt before rank 0 has begun
        time.sleep(0.01)
    raise ValueError(f"bad batch {x}")

run = torchmuster.launch(work, 6, nodes=2, nproc_per_node=1, max_restarts=0)
run.follow()
"""
FIXED = """\
def work(x):
    return x * factor

torchmuster.launch(work, 6, nodes=2, nproc_per_node=1, max_restarts=0).results()
"""
AWAITED = "await torchmuster.launch(work, 2, nproc_per_node=1).results_async()"


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Return what runs cells, each with its outputs; errors of cells are among them."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for name, folder in (
        ("MUSTER_HOME", "home"),
        ("IPYTHONDIR", "ipython"),
        ("JUPYTER_RUNTIME_DIR", "jupyter"),
    ):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")

    def run(cells):
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        made.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python",
            "language": "python",
        }
        where = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(made, timeout=150, resources=where, allow_errors=True).execute()
        return [cell.outputs for cell in made.cells]

    return run


def text_of(outputs):
    said = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs]
    errors = [f"{out.ename}: {out.evalue}" for out in outputs if out.output_type == "error"]
    return "".join([*said, *errors])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the client of notebooks
def test_a_closure_fails_on_two_nodes_is_fixed_and_runs_again(notebook):
    failed, fixed, awaited = notebook([BROKEN, FIXED, AWAITED])

    assert "here 0\n" in text_of(failed)
    assert "RunFailed: rank 1 raised ValueError: bad batch 6" in text_of(failed)
    assert 'raise ValueError(f"bad batch {x}")' in text_of(failed)  # the line of the cell
    assert text_of(fixed) == "[42, 42]"
    assert text_of(awaited) == "[14]"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_the_page_do_what_it_says(notebook):
    said = [text_of(outputs) for outputs in notebook(CELLS)]

    assert not any("Error:" in text or "RunFailed:" in text for text in (said[0], *said[2:6]))
    assert "5 steps with lr 0.01, result 10.0\n" in said[0]
    assert said[0].count("'lr': 0.01") == 4
    assert "ranks 0-1 raised ZeroDivisionError: division by zero" in said[1] or "rank" in said[1]
    assert 'return batch["label"] / 0' in said[1]
    assert said[2].startswith("failed ")
    assert said[3] == "['hello Ada']"
    assert "member 2, lr=0.3 seed=0" in said[4]
    assert "{'lr': 0.3, 'seed': 0}" in said[4]
    assert said[4].count("succeeded") >= 4
    assert said[5] == "hello --lr 0.1\n\n"
    assert "`lock` is a lock" in said[6]
    assert len(said) == 7
