"""What flows into tasks and out of them: URLs, datasets, checkpoints, credentials."""

import json
import os
import textwrap

import pytest

from kit.waiting import wait_until


def task(text):
    """Return a workflow of the task `t`, of which the text says the rest."""
    rest = textwrap.indent(textwrap.dedent(text), "    ")
    return f"workflow:\n  name: w\n  tasks:\n  - name: t\n{rest}"


def test_urls_are_downloaded_and_uploaded_with_their_filters(run_workflow, tmp_path):
    source = tmp_path / "source"
    (source / "train").mkdir(parents=True)
    (source / "train" / "a.txt").write_text("a")
    (source / "train" / "b.bin").write_text("b")
    (source / "other.txt").write_text("c")
    text = task(r"""
    command: [bash, -c, "cd {{input:0}} && find . -type f > {{output}}/list.txt && touch {{output}}/left.out"]
    inputs:
    - {url: "file://FOLDER/source", regex: 'train/.*\.txt$'}
    outputs:
    - {url: "FOLDER/target/{{workflow_id}}", regex: '.*\.txt'}
    """)
    workflow = run_workflow(text)

    assert workflow.code == 0, workflow.out
    target = tmp_path / "target" / "r"
    assert (target / "list.txt").read_text() == "./train/a.txt\n"
    assert not (target / "left.out").exists()


def test_a_failed_command_uploads_to_urls_and_makes_no_version(run_workflow, tmp_path):
    text = task("""
    command: [bash, -c, "echo why > {{output}}/log.txt; exit 3"]
    outputs:
    - url: FOLDER/target
    - dataset: {name: model}
    """)
    workflow = run_workflow(text)

    assert workflow.code == 3
    assert (tmp_path / "target" / "log.txt").read_text() == "why\n"
    assert "the dataset model gets no version" in workflow.out
    assert workflow.muster("dataset", "info", "model").returncode != 0


@pytest.mark.short
def test_datasets_go_from_one_workflow_to_the_next(run_workflow, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "lib.txt").write_text("lib")
    text = """
workflow:
  name: datasets
  groups:
  - name: g
    tasks:
    - name: make
      command: [bash, -c, "mkdir {{output}}/models; cat {{input:0}}/code/lib.txt > {{output}}/models/m; touch {{output}}/junk"]
      inputs:
      - dataset: {name: code, localpath: code}
      outputs:
      - dataset: {name: model, path: models, labels: [kind=test]}
  - name: h
    tasks:
    - name: add
      command: [bash, -c, "mkdir {{output}}/more; echo n > {{output}}/more/n"]
      inputs: [{task: make}]
      outputs:
      - update_dataset: {name: model, paths: [more]}
  - name: i
    tasks:
    - name: read
      command: [bash, -c, "cd {{input:1}} && find . -type f | sort > FOLDER/found"]
      inputs:
      - task: add
      - dataset: {name: "model:latest"}
"""
    workflow = run_workflow(text)

    assert workflow.code == 0, workflow.out
    found = (tmp_path / "found").read_text().split()
    assert [name.split("/")[-1] for name in found] == ["m", "n"]
    assert all(name.startswith("./model/") for name in found)
    first = json.loads(workflow.muster("dataset", "info", "model:1", "--json").stdout)
    assert [file["path"].split("/")[-1] for file in first["files"]] == ["m"]
    assert "code:1" in workflow.out


def test_a_missing_input_is_said_and_nothing_starts(run_workflow, tmp_path):
    text = "command: [touch, FOLDER/began]\ninputs: [{dataset: {name: nowhere}}]\n"
    workflow = run_workflow(task(text))

    assert workflow.code != 0
    assert "nowhere" in workflow.out
    assert "Traceback" not in workflow.out
    assert not (tmp_path / "began").exists()


def test_a_checkpoint_is_uploaded_while_the_task_runs_and_once_more_at_its_end(
    start_workflow, tmp_path
):
    text = task("""
    command: [bash, -c, "mkdir /tmp/ckpt; echo 1 > /tmp/ckpt/step; until [ -e FOLDER/go ]; do sleep 0.05; done; echo 2 > /tmp/ckpt/step"]
    checkpoint:
    - {path: /tmp/ckpt, url: FOLDER/saved, frequency: 200ms}
    """)
    workflow = start_workflow(text)

    def newest():
        here = tmp_path / "here"
        done = workflow.muster("data", "download", str(tmp_path / "saved"), str(here))
        return (here / "step").read_text() if done.returncode == 0 else None

    wait_until((tmp_path / "saved" / "CHECKPOINT.json").exists, "the first checkpoint")
    assert newest() == "1\n"
    (tmp_path / "go").touch()
    assert workflow.wait() == 0, workflow.out
    assert newest() == "2\n"
    assert not os.path.exists("/tmp/ckpt")


def test_credentials_reach_their_task_and_no_file_of_the_run(run_workflow, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "credentials.toml").write_text('[wandb]\nkey = "s3cret-word"\n')
    (home / "credentials.toml").chmod(0o600)
    workflow = run_workflow("""
workflow:
  name: secrets
  tasks:
  - name: t
    command: [bash, -c, "[ $(printf %s $WANDB_API_KEY | wc -c) = 11 ]"]
    credentials:
      wandb: {WANDB_API_KEY: key}
  - name: u
    command: [bash, -c, "[ $(wc -c < /secrets/key) = 11 ] && [ $(stat -c %a /secrets/key) = 600 ]"]
    credentials:
      wandb: /secrets
""")

    assert workflow.code == 0, workflow.out
    for path in workflow.run_dir.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"s3cret-word" not in path.read_bytes(), path


def test_a_missing_credential_names_the_file_to_write(run_workflow):
    workflow = run_workflow(task("command: [env]\ncredentials: {wandb: {KEY: key}}\n"))

    assert workflow.code != 0
    assert "credentials.toml" in workflow.out
    assert "wandb" in workflow.out


def test_a_link_out_of_the_output_is_refused(run_workflow):
    workflow = run_workflow("""
workflow:
  name: links
  groups:
  - name: g
    tasks:
    - name: a
      command: [bash, -c, "ln -s /etc/passwd {{output}}/x"]
  - name: h
    tasks:
    - name: b
      command: [cat, "{{input:0}}/x"]
      inputs: [{task: a}]
""")

    assert workflow.code != 0
    assert "points outside the folder" in workflow.out
    assert "root:" not in workflow.out
