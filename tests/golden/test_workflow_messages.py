"""Every message on a wrong workflow file, word for word; each file stands above what is said about it.

A section of `workflow/<topic>.txt` is a file `<claim>.yaml` as a user might write it, and then the whole answer of
`muster validate <claim>.yaml`. For a new case write the head and the file; `pytest tests/golden --update-golden`
writes the answers. The commands below have no file of their own: they test options.
"""

import json
import re
import shlex
import sys

import pytest

from kit.transcripts import GOLDEN, read_sections
from torchmuster.core.cli.main import main

OPTIONS_TRANSCRIPT = "workflow/options.txt"
TRANSCRIPTS = sorted(f"workflow/{path.name}" for path in (GOLDEN / "workflow").glob("*.txt"))
SECTIONS = {(t, case): text for t in TRANSCRIPTS for case, text in read_sections(t).items()}
# Name of the file: its transcript and its text.
FILES = {
    case: (transcript, text.partition(f"$ muster validate {case}.yaml\n")[0])
    for (transcript, case), text in SECTIONS.items()
    if transcript != OPTIONS_TRANSCRIPT
}
PYTHON_WORDS = re.compile(
    r"Traceback|\bNone\b|\bTrue\b|\bFalse\b|pydantic|<class|\bdict\b|\bstr\b|\bint\b|\bbool\b"
    r"|NoneType|object at 0x"
)
A_FILE = "valid_file_without_a_word.yaml"

# Name of the golden file: command line.
OPTIONS = {
    # The file.
    "validate_of_a_missing_file": "validate valid_file_without_a_wrd.yaml",
    "validate_of_a_folder": "validate data",
    "validate_of_a_picture": "validate picture.png",
    "validate_without_a_file": "validate",
    "submit_without_a_file": "submit --set n_nodes=2",
    "submit_of_a_missing_file": "submit no.yaml --dry-run",
    "render_of_a_missing_file": "render no.yaml",
    "submit_shows_all_mistakes": "submit twelve_mistakes.yaml",
    "render_of_a_wrong_template": "render unknown_value_with_near_miss.yaml",
    "render_shows_warnings": f"render {A_FILE} --set n_node=4",
    "render_without_a_template": "render file_without_values.yaml",
    # --set and its like: the file may stand before or behind.
    **{
        f"{command}_with_values_{place}": f"{command} {words}"
        for command in ("validate", "render")
        for place, words in {
            "before_the_file": f"--set n_nodes=4 lr=1 {A_FILE}",
            "behind_the_file": f"{A_FILE} --set n_nodes=4 lr=1",
            "on_both_sides": f"--set n_nodes=1 lr=2 {A_FILE} --set n_nodes=3",
            "as_text_and_not": f"--set-string n_nodes=1 {A_FILE} --set lr=2 data=x",
        }.items()
    },
    **{
        f"submit_with_values_{place}": f"submit {words}"
        for place, words in {
            "before_the_file": "--set n_nodes=4 lr=1 no.yaml",
            "behind_the_file": "no.yaml --set n_nodes=4 lr=1",
            "and_variables_before_the_file": "--set n_nodes=4 --set-env A=b C=d --label e=f no.yaml",
        }.items()
    },
    "value_that_is_never_used": f"validate {A_FILE} --set n_node=4",
    "values_without_a_template": "validate file_without_values.yaml --set n_nodes=4",
    "value_without_an_equals_sign": f"validate {A_FILE} --set n_nodes",
    "set_without_a_value": f"validate {A_FILE} --set",
    "set_before_the_file_without_a_value": f"validate --set {A_FILE}",
    "value_with_a_dot": f"validate {A_FILE} --set model.lr=1",
    "value_with_a_hyphen": f"validate {A_FILE} --set n-nodes=1",
    "value_named_like_a_token": f"validate {A_FILE} --set output=/x",
    "value_that_is_half_a_list": f"validate {A_FILE} --set 'data=[1, 2'",
    "several_wrong_values": f"validate {A_FILE} --set if=1 data={{ --set 2=3",
    "text_value_without_an_equals_sign": f"validate {A_FILE} --set-string n_nodes",
    "wrong_variable": "submit file_without_values.yaml --dry-run --set-env 1A=x --set-env B",
    "wrong_label": "submit file_without_values.yaml --dry-run --label team --label 'a b=c'",
    "misspelled_option_of_validate": "validate file_without_values.yaml --sett a=1",
    # --help-values.
    "help_of_values": f"submit {A_FILE} --help-values",
    "help_of_values_that_are_not_there": "submit --help-values file_without_values.yaml",
    "help_of_values_of_a_wrong_file": "submit template_in_default_values.yaml --help-values",
    # What a run adds.
    "wrong_durations_and_name": (
        "submit file_without_values.yaml --dry-run --grace soon --backoff x --run-id ../a"
    ),
    "unknown_container": "submit file_without_values.yaml --container lxc",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with all the files, as the working directory, and a MUSTER_HOME."""
    work = tmp_path / "work"
    (work / "data").mkdir(parents=True)
    for name, (_, text) in FILES.items():
        (work / f"{name}.yaml").write_text(text)
    (work / "train.py").write_text("raise SystemExit('this must never run')\n")
    (work / "template.txt").write_text("a line\n{{ no_such_value }}\n")
    (work / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    monkeypatch.chdir(work)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def answer(place, capsys, shown):
    """Run a command line in this process; return what a golden file holds, and the exit code."""
    with pytest.raises(SystemExit) as end:
        main(shlex.split(shown))
    out, err = capsys.readouterr()
    text = f"$ muster {shown}\n{err}{out}exit {end.value.code}\n"
    return text.replace(str(place), "$TMP").replace(sys.executable, "$PYTHON"), end.value.code


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_answered_in_these_words(name, place, capsys, golden):
    text, code = answer(place, capsys, f"validate {name}.yaml")

    transcript, file = FILES[name]
    golden(transcript, name, file + text)
    assert code == (2 if "\nerror: " in text else 0)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_answered_in_these_words(name, place, capsys, golden):
    text, code = answer(place, capsys, OPTIONS[name])

    golden(OPTIONS_TRANSCRIPT, name, text)
    assert code == (2 if "\nerror: " in text else 0)
    assert not (place / "home").exists(), "something was started"


def test_json_holds_every_problem_and_its_place(place, capsys):
    with pytest.raises(SystemExit) as end:
        main(["validate", "twelve_mistakes.yaml", "--json"])
    told = json.loads(capsys.readouterr().out)

    assert end.value.code == 2
    assert told["valid"] is False
    assert len(told["errors"]) >= 12
    assert all(error["at"].startswith("twelve_mistakes.yaml:") for error in told["errors"])


def test_a_file_with_twelve_mistakes_shows_all_of_them_in_one_go():
    text = answer_to("twelve_mistakes")

    places = re.findall(r"^  at: twelve_mistakes\.yaml:\d+:\d+ workflow\.", text, re.MULTILINE)
    assert len(places) >= 12


def answer_to(name):
    """Return what the golden transcript says about a file, or about options."""
    transcript, file = FILES.get(name, (OPTIONS_TRANSCRIPT, ""))
    return read_sections(transcript)[name].removeprefix(file)


@pytest.mark.parametrize("name", [*FILES, *OPTIONS])
def test_every_message_is_for_people(name):
    text = answer_to(name)
    lines = [line for line in text.split("\n")[1:] if not line.startswith("  because: ")]

    assert not PYTHON_WORDS.search("\n".join(lines))
    for line in lines:
        if line.startswith(("error: ", "warning: ")):
            assert not line.endswith(".")
            assert "``" not in line, "an empty text needs a word"


@pytest.mark.parametrize("name", FILES)
def test_every_problem_of_a_file_has_its_line(name):
    text = answer_to(name)
    told = len(re.findall(r"^(?:error|warning): ", text, re.MULTILINE))
    places = re.findall(r"^  at: (\S+)", text, re.MULTILINE)

    assert len(places) == told
    if name not in ("empty_file", "no_workflow_key"):
        assert all(re.match(r"\S+\.(yaml|txt):\d+", place) for place in places)


def test_no_answer_is_left_over_from_options_that_are_gone():
    assert read_sections(OPTIONS_TRANSCRIPT).keys() == OPTIONS.keys()


def test_every_file_stands_in_one_transcript():
    assert len(SECTIONS) == len(FILES) + len(OPTIONS)
