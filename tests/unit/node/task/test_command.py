import pytest

from torchmuster.errors import MusterError
from torchmuster.node.task.command import make_folders


def test_the_folder_of_a_file_that_an_argument_names_in_the_output_is_made(tmp_path):
    output = str(tmp_path / "output")

    make_folders(["--out", f"{output}/models/w.pt", f"--log={output}/logs/x/log"], output)

    assert (tmp_path / "output" / "models").is_dir()
    assert (tmp_path / "output" / "logs" / "x").is_dir()
    assert not (tmp_path / "output" / "models" / "w.pt").exists()


def test_no_folder_is_made_outside_of_the_output(tmp_path):
    output = str(tmp_path / "output")

    make_folders(
        ["--data", f"{tmp_path}/data/x", f"{output}/../up/x", f"{output}-2/x", "x/y", output],
        output,
    )

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "models").write_text("a file")

    with pytest.raises(MusterError) as caught:
        make_folders([f"{tmp_path}/models/w.pt"], str(tmp_path))

    assert caught.value.where == str(tmp_path / "models")
