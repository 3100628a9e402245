import io
import json
import sys

import pytest

from torchmuster.diagnose.cli.lint import lint
from torchmuster.errors import UsageError

ALONE = "#!/bin/bash\n#SBATCH --nodes=2 --time=9\ntorchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=n1 t.py\n"
GOOD = "torchrun --standalone t.py\n"
WARNED = "python -m torch.distributed.launch t.py\n"


@pytest.fixture
def write(tmp_path):
    def make(text, name="job.sh"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return make


def call(*words):
    return lint.main(list(words), standalone_mode=False)


@pytest.mark.parametrize(("text", "code"), [(GOOD, 0), (WARNED, 1), (ALONE, 2)])
def test_the_exit_code_is_that_of_the_worst_finding(write, text, code, capsys):
    assert call(write(text)) == code
    assert capsys.readouterr().err == ""


def test_a_finding_has_its_place_its_reason_and_its_mend(write, capsys):
    path = write(ALONE)

    call(path)

    out = capsys.readouterr().out
    assert out.startswith("error: torchrun starts on the first of 2 nodes only\n")
    assert f"at: {path}:3\n" in out
    assert "because: sbatch runs the script once" in out
    assert "hint: write `muster torchrun ...`: it starts the other nodes too" in out
    assert out.endswith("\n1 error\n")


def test_a_good_script_is_said_to_be_so(write, capsys):
    call(write(GOOD))

    assert capsys.readouterr().out == "nothing was found\n"


def test_json_has_every_finding_of_every_file(write, capsys):
    paths = [write(ALONE, "a.sh"), write(WARNED, "b.sh")]

    assert call("--json", *paths) == 2

    records = json.loads(capsys.readouterr().out)
    assert [(r["file"], r["line"], r["level"], r["rule"]) for r in records] == [
        (paths[0], 3, "error", "head-only"),
        (paths[1], 1, "warning", "deprecated-launch"),
    ]


def test_a_dash_reads_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WARNED.encode())))

    assert call("-") == 1
    assert "at: <stdin>:1\n" in capsys.readouterr().out


def test_a_script_without_training_says_so(write, capsys):
    assert call(write("echo hello\n")) == 0
    assert "no line that is known to start training" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_read_all_the_same(write):
    assert call(write(b"\xff\xfe\x00" + WARNED.encode())) == 0
    assert call(write(b"# \xff\n" + WARNED.encode())) == 1


def test_a_file_that_is_missing_or_too_large_is_an_error_of_ours(write, tmp_path):
    with pytest.raises(UsageError, match="can't be read"):
        call(str(tmp_path / "none.sh"))
    with pytest.raises(UsageError, match="larger than 256 KiB"):
        call(write("#" * 300_000))
