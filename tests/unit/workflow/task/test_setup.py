"""Tokens, files, variables and credentials of a task, just before its command begins."""

import base64

import pytest

from kit.workflows import workflow_plan
from torchmuster.core.files.layout import WorkingFolder
from torchmuster.errors import MusterError
from torchmuster.workflow import plan
from torchmuster.workflow.task import setup

HOSTS = {"lead": "localhost", "w": "node-2"}


def facts_of(task=None, **changed):
    task = task or plan.TaskPlan(
        name="w",
        inputs=(plan.InputPlan(kind=plan.InputKind.TASK, source="make"),),
        command=("true",),
    )
    group = plan.GroupPlan(name="g", tasks=(plan.TaskPlan(name="lead", lead=True), task))
    workflow = workflow_plan(group, run_id="run-1", name="x", uuid="u-1")
    given = {
        "workflow": workflow,
        "group": group,
        "task": task,
        "attempt": 2,
        "place": WorkingFolder("/place"),
        "hosts": HOSTS,
        "addresses": {"lead": "127.0.0.1"},
        "ports": {"": 4000, "http": 4001},
    }
    return setup.TaskFacts(**{**given, **changed})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{output}}/x", "/place/output/x"),
        ("{{input:0}}", WorkingFolder("/place").input(0)),
        ("{{input:make}}", WorkingFolder("/place").input(0)),
        ("{{workflow_id}} {{uuid}}", "run-1 u-1"),
        ("{{host:w}}:{{port}}", "node-2:4000"),
        ("{{ip:lead}}:{{port:http}}", "127.0.0.1:4001"),
        ("{{rank}} of {{num_tasks}}, {{attempt}}", "1 of 2, 2"),
        ("no token", "no token"),
    ],
)
def test_a_token_stands_for_what_is_true_here_and_now(text, expected):
    assert facts_of().resolve(text) == expected


@pytest.mark.parametrize("text", ["{{host:nobody}}", "{{port:none}}", "{{input:other}}", "{{ x }}"])
def test_what_stands_for_nothing_is_left_as_it_is(text):
    assert facts_of().resolve(text) == text


def test_what_a_token_stands_for_is_not_read_again():
    assert facts_of(hosts={"w": "{{output}}"}).resolve("{{host:w}}") == "{{output}}"


def test_every_word_of_a_command_is_resolved():
    task = plan.TaskPlan(name="w", command=("cp", "{{output}}/a", "{{output}}/b"))
    resolved = tuple(map(facts_of(task).resolve, task.command))
    assert resolved == ("cp", "/place/output/a", "/place/output/b")


BINARY = b"\xff{{output}}"


@pytest.mark.parametrize(
    ("content", "how", "expected"),
    [
        ("{{output}}", {}, b"/place/output"),
        ("{{output}}", {"tokens": False}, b"{{output}}"),
        (base64.b64encode(BINARY).decode(), {"is_base64": True}, BINARY),
    ],
    ids=["inline", "local", "binary"],
)
def test_inline_files_get_their_tokens_and_others_stay_as_they_are(content, how, expected):
    file = plan.TaskFile(path="/x", content=content, **how)
    assert setup.file_content(file, facts_of()) == expected


def test_a_relative_path_of_a_file_starts_at_the_working_directory():
    entry = plan.TaskFile(path="conf/{{rank}}.yaml", content="")
    assert setup.file_path(entry, facts_of()) == f"{WorkingFolder('/place').work}/conf/1.yaml"
    assert setup.file_path(plan.TaskFile(path="/etc/x", content=""), facts_of()) == "/etc/x"


def test_the_file_s_variables_come_after_those_of_the_machine():
    task = plan.TaskPlan(name="w", environment={"A": "{{rank}}", "B": "own"})
    variables = setup.environment(facts_of(task), {"B": "machine", "C": "c"}, None)
    assert (variables["A"], variables["B"], variables["C"]) == ("1", "own", "c")
    assert "CUDA_VISIBLE_DEVICES" not in variables


@pytest.mark.parametrize(("gpus", "expected"), [((), ""), (("0", "2"), "0,2")])
def test_a_task_sees_its_gpus_and_no_others(gpus, expected):
    variables = setup.environment(facts_of(), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, gpus)
    assert variables["CUDA_VISIBLE_DEVICES"] == expected


def test_a_task_may_choose_its_gpus_itself():
    task = plan.TaskPlan(name="w", environment={"CUDA_VISIBLE_DEVICES": "1"})
    assert setup.environment(facts_of(task), {}, ("0",))["CUDA_VISIBLE_DEVICES"] == "1"


# Credentials.

WITH_SECRETS = plan.TaskPlan(
    name="w",
    credentials=(
        plan.Credential(name="hub", variables={"TOKEN": "key"}),
        plan.Credential(name="store", folder="/secrets"),
    ),
)


@pytest.fixture
def credentials(tmp_path, monkeypatch):
    """Return a function that writes the user's credentials."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))

    def write(text, mode=0o600):
        path = tmp_path / "credentials.toml"
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


def test_secrets_become_variables_and_files(credentials):
    credentials('[hub]\nkey = "s3cret"\n[store]\nid = "me"\npin = "42"\n')
    secrets = setup.read_credentials(WITH_SECRETS)
    assert setup.credential_variables(WITH_SECRETS, secrets) == {"TOKEN": "s3cret"}
    assert setup.credential_files(WITH_SECRETS, secrets) == {
        "/secrets/id": b"me",
        "/secrets/pin": b"42",
    }


def test_a_task_without_credentials_reads_no_file(credentials):
    credentials("not TOML at all", mode=0o644)
    assert setup.read_credentials(plan.TaskPlan(name="w")) == {}


def test_a_missing_file_of_credentials_is_explained_with_a_command(credentials):
    with pytest.raises(MusterError, match="needs the credential `hub`") as caught:
        setup.read_credentials(WITH_SECRETS)
    assert "chmod 600" in caught.value.fix


def test_credentials_that_others_can_read_are_refused(credentials):
    path = credentials('[hub]\nkey = "s3cret"\n[store]\n', mode=0o640)
    with pytest.raises(MusterError, match="can be read by others") as caught:
        setup.read_credentials(WITH_SECRETS)
    assert caught.value.why == "mode 0640"
    assert caught.value.fix == f"chmod 600 {path}"


def test_a_misspelled_credential_is_named_with_its_nearest(credentials):
    credentials('[hubb]\nkey = "s3cret"\n[store]\n')
    with pytest.raises(MusterError, match="no credential `hub`") as caught:
        setup.read_credentials(WITH_SECRETS)
    assert caught.value.fix == "did you mean `hubb`?"


def test_a_missing_key_is_named_with_those_that_are_there_and_no_value(credentials):
    credentials('[hub]\nother = "s3cret"\n[store]\n')
    secrets = setup.read_credentials(WITH_SECRETS)
    with pytest.raises(MusterError, match="has no key `key`") as caught:
        setup.credential_variables(WITH_SECRETS, secrets)
    assert caught.value.fix == "its keys: other"
    assert "s3cret" not in repr(caught.value)


def test_a_broken_file_of_credentials_is_no_traceback_and_shows_no_secret(credentials):
    credentials('[hub\nkey = "s3cret"\n')
    with pytest.raises(MusterError, match="not TOML") as caught:
        setup.read_credentials(WITH_SECRETS)
    assert "s3cret" not in str(caught.value.why)
