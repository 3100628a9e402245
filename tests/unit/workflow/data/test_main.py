import json

from kit.tables import words
from torchmuster.workflow.data.__main__ import main


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_transfer_says_its_progress_and_its_result(folder, tmp_path, capsys):
    assert main(["upload", str(folder), str(tmp_path / "up")]) == 0

    said = lines(capsys)
    assert {key for line in said for key in line} == {"progress", "done"}
    assert said[-1] == {"done": {"num_files": 3, "total_bytes": 11, "num_skipped": 0}}


def test_datasets_go_there_and_back(folder, tree, tmp_path, capsys):
    store = ["--store", str(tmp_path / "sets")]
    about = [*words("--name d --metadata k=1 --run-id r --tag t --from"), str(folder)]
    assert main(["dataset-upload", *about, *store]) == 0
    assert main(["dataset-download", "--name", "d:t", "--to", str(tmp_path / "x"), *store]) == 0

    done = lines(capsys)[-1]["done"]
    assert (done["name"], done["version"], done["num_files"]) == ("d", 1, 3)
    assert tree(tmp_path / "x") == tree(folder)


def test_what_will_not_pass_ends_with_11_and_its_four_parts(tmp_path, capsys):
    assert main(["download", str(tmp_path / "none"), "--to", str(tmp_path / "x")]) == 11

    assert set(lines(capsys)[0]["error"]) == {"what", "where", "why", "fix"}


def test_a_wrong_command_line_is_a_line_too(capsys):
    assert main(["downlod"]) == 11
    assert main(["download", "x"]) == 11

    assert [list(line) for line in lines(capsys)] == [["error"], ["error"]]


def test_a_locked_folder_ends_with_10(folder, tmp_path, capsys):
    from torchmuster.workflow.data.fetch import DownloadRecord

    record = DownloadRecord(str(tmp_path / "x"))
    record.open()
    try:
        assert main(["download", str(folder), "--to", str(tmp_path / "x")]) == 10
    finally:
        record.close()
