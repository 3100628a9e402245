"""Inputs from other tasks, what is uploaded when, and the link to the output that counts."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from torchmuster.core.files.layout import RunDir, WorkingFolder
from torchmuster.errors import MusterError
from torchmuster.workflow import plan
from torchmuster.workflow.task import data


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """Return the directory of a run in which the task `make` has left an output."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    found = RunDir(str(tmp_path / "runs" / "now"))
    leave_output(found, "make", {"a/x.txt": "from make", "b/y.bin": "bytes"})
    return found


def leave_output(run_dir, task, files):
    place = WorkingFolder(os.path.join(run_dir.task_folder(task), "place-0"))
    for name, text in files.items():
        path = Path(place.output, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    data.publish(run_dir.task_output(task), place.output)


@pytest.fixture
def place(tmp_path):
    """Return the working folder of a task, with an output of no file."""
    found = WorkingFolder(str(tmp_path / "place"))
    os.makedirs(found.output)
    return found


def fetch(run_dir, place, **options):
    """Fetch the output of the task `make`; return what was said meanwhile."""
    doing = []
    task = plan.TaskPlan(name="use", inputs=(from_task("make", **options),))
    asyncio.run(data.fetch_inputs(task, place, run_dir, doing.append, str))
    return doing


def from_task(source, **options):
    return plan.InputPlan(kind=plan.InputKind.TASK, source=source, **options)


def test_an_input_is_a_copy_of_another_task_s_output(run_dir, place):
    assert fetch(run_dir, place) == ["copying input 0: the output of make"]
    Path(place.input(0), "a", "x.txt").write_text("more")
    made = Path(run_dir.task_output("make"), "a", "x.txt").read_text()
    assert made == "from make", "what a task does to its input stays with it"


def test_a_regex_takes_a_part_of_an_output(run_dir, place):
    fetch(run_dir, place, regex=r"b/.*\.bin")
    assert os.listdir(place.input(0)) == ["b"]


def test_an_input_can_come_from_another_run(run_dir, place, tmp_path):
    leave_output(RunDir(str(tmp_path / "runs" / "before")), "make", {"z": "old"})
    fetch(run_dir, place, run_id="before")
    assert os.listdir(place.input(0)) == ["z"]


def test_a_task_without_an_output_is_named(run_dir):
    with pytest.raises(MusterError, match="`other` has left no output"):
        data.task_output(from_task("other"), run_dir)


def test_the_published_output_is_that_of_the_last_attempt(tmp_path):
    link = tmp_path / "output"
    for attempt in range(2):
        folder = tmp_path / f"place-{attempt}" / "output"
        folder.mkdir(parents=True)
        (folder / "which").write_text(str(attempt))
        data.publish(str(link), str(folder))
    assert (link / "which").read_text() == "1"
    assert not os.path.isabs(os.readlink(link)), "a run directory can be moved"
    assert sorted(os.listdir(tmp_path)) == ["output", "place-0", "place-1"]


def upload(place, succeeded=True, **output):
    doing = []
    task = plan.TaskPlan(name="make", outputs=(plan.OutputPlan(**output),))
    given = {"run_id": "r", "resolve": lambda text: text.replace("{{workflow_id}}", "r")}
    uploading = data.upload_outputs(task, place, doing.append, succeeded=succeeded, **given)
    stored = asyncio.run(uploading)
    return stored.notes, doing


def test_a_dataset_gets_no_version_after_a_failure(place):
    of_run = {"kind": plan.OutputKind.DATASET, "target": "set-{{workflow_id}}"}
    notes = ["the dataset set-r gets no version: the command failed"]
    assert upload(place, succeeded=False, **of_run) == (notes, [])


@pytest.mark.parametrize("kind", [plan.OutputKind.URL, plan.OutputKind.DATASET])
def test_an_empty_output_is_said_and_not_uploaded(place, kind):
    os.makedirs(os.path.join(place.output, "only", "folders"))
    notes = ["nothing to upload to there: output is empty or missing"]
    assert upload(place, kind=kind, target="there") == (notes, [])


def test_a_missing_part_of_a_dataset_is_named(place):
    Path(place.output, "a").mkdir()
    Path(place.output, "a", "x").touch()
    notes, _ = upload(place, kind=plan.OutputKind.DATASET, target="set", paths=("a", "b"))
    assert notes == ["nothing to upload to set: output/b is empty or missing"]


def test_a_long_copy_says_how_far_it_is(tmp_path):
    source, said = tmp_path / "made", []
    source.mkdir()
    for number in range(12):
        (source / f"part-{number}").write_bytes(bytes(8 << 20))

    where = str(source), str(tmp_path / "in")
    asyncio.run(data.copy_with_progress(*where, None, "copying", said.append, 0.0005))

    assert len(os.listdir(tmp_path / "in")) == 12
    assert all(one.startswith("copying: ") for one in said)
    assert any(" of 96 MiB (" in one for one in said)


def test_a_copy_that_fails_says_why(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "out").symlink_to("/etc/hostname")

    where = str(tmp_path / "made"), str(tmp_path / "in")
    with pytest.raises(MusterError, match="points outside"):
        asyncio.run(data.copy_with_progress(*where, None, "copying", print))


@pytest.fixture
def movers(tmp_path, monkeypatch):
    """Let programs that write down what they were given stand for those that move files; return what they wrote."""
    noted = tmp_path / "noted"
    noted.mkdir()
    program = (
        "import json, os, sys; f = open(sys.argv[1] + '/' + str(os.getpid()), 'w');"
        " json.dump([sys.argv[2:], dict(os.environ)], f); f.close(); print(json.dumps({'done': {}}))"
    )
    real = data.Transfer

    def begin(argv, *given, **options):
        return real([argv[0], "-c", program, str(noted), *argv[3:]], *given, **options)

    monkeypatch.setattr(data, "Transfer", begin)
    return lambda: [json.loads(path.read_text()) for path in noted.iterdir()]


def test_data_moves_with_the_credentials_of_its_task_alone(run_dir, place, tmp_path, movers):
    keys = tmp_path / "credentials.toml"
    keys.touch(mode=0o600)
    keys.write_text("[s3]\nsecret = 'not-to-be-seen'\n[other]\nsecret = 'not-given'\n")
    task = plan.TaskPlan(
        name="use",
        inputs=(plan.InputPlan(kind=plan.InputKind.URL, source="s3://b/in"),),
        outputs=(plan.OutputPlan(kind=plan.OutputKind.URL, target="s3://b/out"),),
        credentials=(plan.Credential(name="s3", variables={"AWS_SECRET_ACCESS_KEY": "secret"}),),
    )
    Path(place.output, "x").touch()
    said = []

    async def move():
        await data.fetch_inputs(task, place, run_dir, said.append, str)
        entry = plan.CheckpointPlan(path="/c", url="s3://b/c", frequency_s=1, regex=None)
        variables = data.credential_variables_of(task)
        await data.start_checkpoint(entry, "/c", str, said.append, variables).finish()
        await data.upload_outputs(task, place, said.append, succeeded=True, run_id="r", resolve=str)

    asyncio.run(move())
    assert {words[0] for words, _ in movers()} == {"download", "checkpoint", "upload"}
    for words, environment in movers():
        assert environment["AWS_SECRET_ACCESS_KEY"] == "not-to-be-seen"
        assert "not-given" not in environment.values()
        assert "not-to-be-seen" not in " ".join(words)
    assert "not-to-be-seen" not in "".join(said)
