import pytest

from torchmuster.cli.diagnosis.convert import convert
from torchmuster.errors import ManyErrors

LONG = """\
workflow:
  name: fit
  tasks:
  - name: fit
    command: [torchrun, --nproc_per_node, "2", /data/fit.py]
"""
SHORT = """\
workflow:
  name: fit
  tasks:
  - name: fit
    nodes: 1
    nproc_per_node: 2
    script: /data/fit.py
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text(LONG)
    return path


def call(*words):
    return convert.main([str(word) for word in words], standalone_mode=False)


def test_the_new_text_goes_to_stdout_and_the_difference_to_stderr(file, capsys):
    assert call(file) == 0

    out, err = capsys.readouterr()
    assert out == SHORT
    assert "-    command: [torchrun" in err
    assert "+    nodes: 1\n" in err
    assert file.read_text() == LONG


def test_with_diff_only_the_difference_is_printed(file, capsys):
    call(file, "--diff")

    out, err = capsys.readouterr()
    assert out.startswith(f"--- {file}\n")
    assert "+    script: /data/fit.py\n" in out
    assert "@@" not in err


def test_the_new_text_can_be_written_over_the_old_one(file, capsys):
    file.chmod(0o600)

    call(file, "-o", file)

    assert file.read_text() == SHORT
    assert file.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().out == ""


def test_a_file_that_can_not_be_converted_leaves_the_other_one_alone(file, tmp_path):
    file.write_text(LONG.replace("torchrun", "ls"))

    with pytest.raises(ManyErrors) as caught:
        call(file, "-o", tmp_path / "out.yaml")

    assert [error.what for error in caught.value.errors] == ["no task of this file starts torchrun"]
    assert not (tmp_path / "out.yaml").exists()


def test_values_fill_the_template_while_it_is_checked(file, capsys):
    file.write_text(LONG.replace('"2"', '"{{ n }}"'))

    call("--set", "n=3", file)

    assert "nproc_per_node: {{ n }}\n" in capsys.readouterr().out


def test_a_new_file_in_another_folder_is_told_where_its_paths_start(file, tmp_path, capsys):
    (tmp_path / "sub").mkdir()

    call(file, "-o", tmp_path / "sub" / "w.yaml")

    assert f"of the new file start at {tmp_path}/sub\n" in capsys.readouterr().err
