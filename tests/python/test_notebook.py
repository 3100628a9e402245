"""A real notebook: the cells of docs/python.md, and a closure that fails on two nodes, is fixed and runs again in a session."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from kit.command import SOURCE
from kit.waiting import wait_until

# Warnings are those of the client of notebooks.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LIMIT_S = 120.0
PAGE = SOURCE.parent / "docs" / "python.md"
CELLS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)

BROKEN = """\
import os, pathlib, time
factor, printed = 7, pathlib.Path("printed").resolve()

def work(x):
    if os.environ["RANK"] == "0":
        print("here", os.environ["RANK"], flush=True)
        printed.touch()
        time.sleep(600)  # ended with the attempt
    while not printed.exists():  # else rank 1 may end the attempt before rank 0 has begun
        time.sleep(0.01)
    raise ValueError(f"bad batch {x}")

run = held.launch(work, 6, max_restarts=0)
run.follow()
"""
FIXED = """\
def work(x):
    return x * factor

held.launch(work, 6).results()
"""
HELD = "import torchmuster; held = torchmuster.session(nodes=2, nproc_per_node=1)"
AWAITED = "await held.launch(work, 2, nodes=1).results_async()"
GIVEN_BACK = "held.end(); torchmuster.sessions()"
FOLLOWED = """\
import os, pathlib, time
import torchmuster
import torchmuster.launcher.api.follow
torchmuster.launcher.api.follow._STATUS_EVERY_S = 0.1
folder = pathlib.Path.cwd()

def endless():
    print("begun", flush=True)
    (folder / "begun").touch()
    time.sleep(600)

class Display:  # what the cell shows, kept
    def __init__(self, display):
        self.display, self.said = display, (folder / "shown").open("a")
    def __call__(self, data, **more):
        return Display(self.display(data, **more)).note(data)
    def note(self, data):
        print(data["text/plain"], file=self.said, flush=True)
        return self
    def update(self, data, **more):
        self.display.update(data, **more)
        self.note(data)

import IPython.display
IPython.display.display = Display(IPython.display.display)
pathlib.Path("kernel").write_text(str(os.getpid()))
run = torchmuster.launch(endless, nproc_per_node=1)
run.follow()
"""


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Return what runs cells, each with its outputs; errors of cells are among them."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    folders = {"MUSTER_HOME": "home", "IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "jupyter"}
    for name, folder in folders.items():
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


def test_a_closure_fails_on_two_nodes_is_fixed_and_runs_again(notebook):
    _, failed, fixed, awaited, over = notebook([HELD, BROKEN, FIXED, AWAITED, GIVEN_BACK])

    assert "here 0\n" in text_of(failed)
    assert "RunFailed: rank 1 raised ValueError: bad batch 6" in text_of(failed)
    (error,) = (out for out in failed if out.output_type == "error")
    frames = re.findall(r'File "(.*?)"', "\n".join(error.traceback))
    assert frames
    assert all("/ipykernel_" in frame for frame in frames), frames  # none is of this library
    assert 'raise ValueError(f"bad batch {x}")' in text_of(failed)  # the line of the cell
    assert text_of(fixed) == "[42, 42]"
    assert text_of(awaited) == "[14]"
    assert text_of(over) == "[]"


def test_a_cell_shows_the_status_and_the_kernel_s_interrupt_cancels_the_run(notebook, tmp_path):
    def interrupt():
        """Do as `KernelManager.interrupt_kernel`, once the cell has shown the status."""

        def log():
            return "".join(
                one.read_text() for one in tmp_path.glob("home/runs/*/logs/main/**/rank-0.log")
            )

        wait_until(lambda: "begun" in log(), "the function to begin", LIMIT_S)
        shown = tmp_path / "shown"
        wait_until(shown.exists, "a status", LIMIT_S)
        before = shown.read_text().count("\n")
        wait_until(lambda: shown.read_text().count("\n") > before + 2, "more of them", LIMIT_S)
        os.kill(int((tmp_path / "kernel").read_text()), signal.SIGINT)

    beside = threading.Thread(target=interrupt)
    beside.start()
    followed, after = notebook([FOLLOWED, "run.status().state"])
    beside.join()

    assert "begun\n" in text_of(followed)
    assert re.search(r"Interrupted: cancelled \S+-\w{4}", text_of(followed))
    (interrupted,) = (out for out in followed if out.output_type == "error")
    assert len(interrupted.traceback) == 1  # no frame of anybody
    assert text_of(after) == "'cancelled'"
    shown = [one["data"]["text/plain"] for one in followed if one.output_type == "display_data"]
    assert shown == [""]  # one output, which was replaced, and is empty at the end
    assert Path(tmp_path, "shown").read_text().count("\n") > 1


WAITED = """
from torchmuster import launch

def wait_a_while():
    import time
    time.sleep(5)
    return 7

launch(wait_a_while).results()
"""


def test_a_cell_that_waits_for_results_shows_where_the_run_stands(notebook):
    (waited,) = notebook([WAITED])
    shown = [one["data"]["text/plain"] for one in waited if one.output_type == "display_data"]
    assert shown == [""]  # it was replaced while the run went on, and is empty at the end
    assert text_of(waited).endswith("[7]")


def test_the_examples_of_the_page_do_what_it_says(notebook):
    said = [text_of(outputs) for outputs in notebook(CELLS)]

    others = (said[0], *said[2:7])
    assert [text for text in others if "Error:" in text or "RunFailed:" in text] == []
    assert "5 steps with lr 0.01, result 10.0\n" in said[0]
    assert said[0].count("'lr': 0.01") == 4
    assert re.search(r"^(ranks 0-1|rank [01]) raised ZeroDivisionError: division by zero", said[1])
    assert 'return batch["label"] / 0' in said[1]
    assert said[2].startswith("failed ")
    assert said[3] == "0.02 []\n"
    assert said[4] == "['hello Ada']"
    assert "member 2, lr=0.3 seed=0" in said[5]
    assert "{'lr': 0.3, 'seed': 0}" in said[5]
    assert said[5].count("succeeded") >= 4
    assert said[6] == "hello --lr 0.1\n\n"
    assert "`lock` is a lock" in said[7]
    assert len(said) == 8
