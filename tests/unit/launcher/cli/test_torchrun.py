import os
from types import SimpleNamespace

from kit.values import run_plan, run_result
from torchmuster.core.files.atomic import write_json
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.launcher.cli.torchrun import _create_run_dir, _say_end, _warn_of_late_option

RUN_ID = "20260101-000000-train-ab12"


def test_the_head_names_the_runs_folder_and_its_end_on_standard_error(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    plan = run_plan(run_id=RUN_ID)
    folder = str(tmp_path / "runs" / RUN_ID)

    assert _create_run_dir(RunDir(folder), plan) == f"run train-ab12; its files are in {folder}"

    result = run_result(run_id=RUN_ID, elapsed_s=2.0)
    write_json(RunDir(folder).result, codec.to_plain(result))
    _say_end(SimpleNamespace(head=SimpleNamespace(run_dir=RunDir(folder))))
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "muster: succeeded after 2.0 s (1 attempt)\n")

    _say_end(SimpleNamespace(head=None))  # an agent that is not the head
    assert capsys.readouterr().err == ""
    assert os.path.isdir(folder)


def test_an_option_of_the_launcher_behind_the_script_is_told(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import argparse\n")
    program = SimpleNamespace(target=str(script), args=("--lr", "1", "--nproc_per_node=2"))
    _warn_of_late_option(SimpleNamespace(program=program))

    said = capsys.readouterr().err
    assert said.startswith(f"muster: `--nproc-per-node` comes after {script}")
    assert said.count("\n") == 1
