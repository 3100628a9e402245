"""What may stand behind --stage and --before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.plan import Stage
from torchmuster.core.spec.launch import parse_commands, parse_stages
from torchmuster.core.spec.problems import Problems


def parse(*texts, cwd="/home/me"):
    problems = Problems()
    return parse_stages(texts, cwd, problems), [error.what for error in problems.found]


@pytest.mark.parametrize(
    ("text", "source", "target"),
    [
        ("data", "/home/me/data", "data"),
        ("../shared/data/", "/home/shared/data", "data"),
        ("/data/train.tar.zst", "/data/train.tar.zst", "."),
        ("d.zip:in/here", "/home/me/d.zip", "in/here"),
        ("/data/x.bin:weights.bin", "/data/x.bin", "weights.bin"),
        ("list.csv.gz", "/home/me/list.csv.gz", "list.csv.gz"),
        ("d.tar.lz4:d.tar.lz4", "/home/me/d.tar.lz4", "d.tar.lz4"),
    ],
)
def test_a_source_keeps_its_name_and_an_archive_lands_in_the_folder_itself(text, source, target):
    assert parse(text) == ((Stage(source=source, target=target),), [])


def test_a_colon_in_the_name_of_a_file_is_no_target(tmp_path):
    (tmp_path / "a:b").write_text("x")
    stages, problems = parse("a:b", cwd=str(tmp_path))
    assert (stages[0].target, problems) == ("a:b", [])


def test_all_problems_come_at_once():
    stages, problems = parse("a:/abs", "b:../up", "c:", "", "d:.muster/x", "e:.", "f.tar.lz4.xz")
    assert stages == ()
    assert len(problems) == 7
    assert "absolute" in problems[0]
    assert "is outside" in problems[1]


def test_two_sources_of_one_name_are_refused():
    _, problems = parse("/a/data", "/b/data")
    assert problems == ["two sources go to `data`"]


def test_two_archives_may_share_a_folder():
    assert parse("a.tar", "b.tar")[1] == []


@given(st.text(max_size=40))
def test_no_target_leads_out_of_the_scratch_folder(text):
    stages, _ = parse(f"src:{text}")
    for stage in stages:
        assert not stage.target.startswith(("/", "../"))
        assert stage.target != ".."


def test_an_empty_command_is_a_problem():
    problems = Problems()
    assert parse_commands(("nvidia-smi",), problems) == ("nvidia-smi",)
    assert problems.found == []
    parse_commands((" ",), problems)
    assert len(problems.found) == 1
