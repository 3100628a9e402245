import pytest

from torchmuster.errors import UsageError
from torchmuster.workflow.data.reference import parse_metadata


def test_words_and_files_are_put_together(tmp_path):
    (tmp_path / "m.yaml").write_text("a: [1, 2]\nday: 2026-01-02\nb: old\n")

    found = parse_metadata([str(tmp_path / "m.yaml"), "b=0.5", "c=x=y", "d=true", "e=null"])

    assert found == {
        "a": [1, 2],
        "day": "2026-01-02",
        "b": 0.5,
        "c": "x=y",
        "d": True,
        "e": "null",
    }


@pytest.mark.parametrize("text", ["- a", "a: [", "!!python/object:os.system {}"])
def test_a_file_without_keys_and_values_is_a_sentence(tmp_path, text):
    (tmp_path / "m.yaml").write_text(text)

    with pytest.raises(UsageError):
        parse_metadata([str(tmp_path / "m.yaml")])


def test_what_is_neither_a_pair_nor_a_file_is_refused():
    with pytest.raises(UsageError, match="neither `key=value`"):
        parse_metadata(["nothing"])
