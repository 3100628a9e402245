"""Make the picture of the README: `muster top` on a real run, of which a worker was killed.

    picture.py          runs it, and writes docs/pictures/top.json (what was known at that moment) and top.svg
    picture.py --draw   draws top.svg again from top.json, after a change of the view

A test holds that the picture is what the view makes of these facts.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FACTS, PICTURE = ROOT / "docs" / "pictures" / "top.json", ROOT / "docs" / "pictures" / "top.svg"
COLUMNS, ROWS = 100, 16
_LIMIT_S = 180.0
_TRAIN = (
    *("examples/mingpt/train.py", "--layers", "2", "--width", "64", "--context", "64"),
    *("--batch-size", "32", "--epochs", "200", "--save-every", "50"),
)


def take() -> dict[str, Any]:
    """Return what `muster top --json` says of a run that trains again after a worker was killed."""
    muster = [sys.executable, "-m", "torchmuster"]
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "MUSTER_HOME": home, "OMP_NUM_THREADS": "1"}
        text = ["--text", "docs/design.md"]
        words = [*muster, "run", "--nodes", "2", "--nproc-per-node", "2", "--name", "gpt"]
        run = subprocess.Popen(
            [*words, *_TRAIN, *text], env=env, cwd=ROOT, stdout=subprocess.DEVNULL
        )

        def look() -> dict[str, Any]:
            said = subprocess.run(
                [*muster, "top", "--json", "last"], env=env, capture_output=True, check=False
            )
            return json.loads(said.stdout) if said.returncode == 0 else {}

        try:
            wait_for(lambda: ((look().get("training") or {}).get("saved_step") or 0) > 100)
            kill_a_worker(home)
            return wait_for(
                lambda: (
                    facts
                    if (facts := look()).get("num_attempts") == 2
                    and None not in ((facts["sample"] or {}).get("wait_s") or [None])
                    and facts["sample"]["over_s"] > 10
                    else None
                )
            )
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(60)


def kill_a_worker(home: str) -> None:
    """Send SIGKILL to a worker: a process of the script whose rank is 3."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        is_ours = f"MUSTER_HOME={home}".encode() in environ and b"train.py" in command
        if is_ours and rank_of(folder) == "3":
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise RuntimeError("there is no rank 3")


def rank_of(folder: Path) -> str:
    """Return the rank of a forked worker by the file of its output."""
    try:
        target = os.readlink(folder / "fd" / "700")  # where it writes its stacks
    except OSError:
        return ""
    return target.rpartition("-")[2].split(" ")[0]


def wait_for(condition: Any) -> Any:
    """Return what the condition returns, when it is something."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(1.0)
    raise TimeoutError("the run did not get there")


def draw_svg(facts: dict[str, Any]) -> str:
    """Return the picture that `muster top` makes of these facts, as SVG without fonts from elsewhere."""
    from rich.console import Console

    from torchmuster.core.model import codec
    from torchmuster.launcher.model.live import LiveRun
    from torchmuster.report.cli.top_screen import as_rich
    from torchmuster.report.top import Known, Page, ViewState, draw

    run = codec.from_plain(LiveRun, facts)
    state = ViewState(page=Page.RUN)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for one in draw(state, Known(run=run), COLUMNS, ROWS).lines:
        console.print(as_rich(one, COLUMNS))
    svg = console.export_svg(title="muster top", unique_id="top")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def main() -> None:
    """Make the picture."""
    PICTURE.parent.mkdir(exist_ok=True)
    if sys.argv[1:] != ["--draw"]:
        FACTS.write_text(json.dumps(take(), indent=1) + "\n")
    PICTURE.write_text(draw_svg(json.loads(FACTS.read_text())))


if __name__ == "__main__":
    main()
