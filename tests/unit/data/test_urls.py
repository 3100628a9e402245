import pytest

from torchmuster.data.faults import DataError
from torchmuster.data.place import LocalPlace
from torchmuster.data.urls import open_place


@pytest.mark.parametrize("scheme", ["swift", "tos"])
def test_a_scheme_without_a_file_system_is_refused_with_the_way_round(scheme):
    with pytest.raises(DataError) as caught:
        open_place(f"{scheme}://bucket/x")

    assert "AWS_ENDPOINT_URL" in caught.value.fix
    assert not caught.value.may_pass


@pytest.mark.parametrize(
    ("url", "meant"), [("s4://b/x", "s3://"), ("azur://b/x", "azure://"), ("flie:///x", "file://")]
)
def test_the_nearest_scheme_is_suggested(url, meant):
    with pytest.raises(DataError) as caught:
        open_place(url)

    assert caught.value.fix == f"did you mean `{meant}`?"


def test_plain_paths_and_file_urls_are_folders(tmp_path):
    assert open_place(str(tmp_path)).url == open_place(f"file://{tmp_path}").url == str(tmp_path)
    assert isinstance(open_place("some/where"), LocalPlace)


@pytest.mark.parametrize("url", ["s3://", "file://relative", "", "a\0b"])
def test_a_url_that_names_nothing_is_refused(url):
    with pytest.raises(DataError):
        open_place(url)
