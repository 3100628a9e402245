"""Data files of the package: what a paragraph is, what a file's own names stand for, and what is refused."""

import pytest

from torchmuster.launcher.files.paragraphs import read_paragraphs


@pytest.fixture
def read(tmp_path):
    def read(text, names=None):
        (tmp_path / "x.txt").write_text(text)
        return read_paragraphs(str(tmp_path / "x.txt"), names)

    return read


def test_a_value_is_the_rest_of_its_line_and_a_field_may_have_several(read):
    (one,) = read("# A comment.\n\n[a]\nsays: x: #  y\nsays: [z]\n")
    assert (one.name, one.where) == ("a", "x.txt, line 3")
    assert one.fields == {"says": ["x: #  y", "[z]"]}
    assert one.one("says") == "x: #  y"
    assert one.one("hint", "none") == "none"


def test_a_paragraph_may_be_a_table_or_a_list_of_words(read):
    table, words = read("[a]\nx: one\ny: two\ny: three\n\n[b]\nwords: u v\nwords: w\n")
    assert table.table == {"x": "one", "y": "two"}
    assert words.words == {"u", "v", "w"}


def test_a_paragraph_without_a_name_holds_for_all_that_follow_until_the_next(read):
    found = read("source: one\ntells: much\n\n[a]\n\n[b]\nsource: own\n\nsource: two\n\n[c]\n")
    assert [p.fields for p in found] == [
        {"source": ["one"], "tells": ["much"]},
        {"source": ["own"], "tells": ["much"]},
        {"source": ["two"]},
    ]


def test_names_of_a_file_and_of_its_reader_stand_for_their_text(read):
    (one,) = read("let b: (<<a>>)+\n\n[x]\nsays: ^<<b>>$\n", {"a": "w"})
    assert one.fields == {"says": ["^(w)+$"]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a]\n\n[a]\n", "line 3: a is there twice"),
        ("[a]\nsays x\n", "line 2: neither a name nor a field"),
        ("[a]\nsays: <<b>>\n", "line 2: nothing is called b"),
    ],
)
def test_what_is_no_paragraph_is_refused_with_its_line(read, text, why):
    with pytest.raises(ValueError, match=why):
        read(text)
