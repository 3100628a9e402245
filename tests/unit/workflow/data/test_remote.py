import pytest

from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.remote import open_store
from torchmuster.workflow.data.store import LocalStore


@pytest.mark.parametrize("scheme", ["swift", "tos"])
def test_a_scheme_without_a_file_system_is_refused_with_the_way_round(scheme):
    with pytest.raises(DataError) as caught:
        open_store(f"{scheme}://bucket/x")

    assert "AWS_ENDPOINT_URL" in caught.value.fix
    assert not caught.value.may_pass


@pytest.mark.parametrize(
    ("url", "meant"), [("s4://b/x", "s3://"), ("azur://b/x", "azure://"), ("flie:///x", "file://")]
)
def test_the_nearest_scheme_is_suggested(url, meant):
    with pytest.raises(DataError) as caught:
        open_store(url)

    assert caught.value.fix == f"did you mean `{meant}`?"


def test_plain_paths_and_file_urls_are_folders(tmp_path):
    assert open_store(str(tmp_path)).url == open_store(f"file://{tmp_path}").url == str(tmp_path)
    assert isinstance(open_store("some/where"), LocalStore)


@pytest.mark.parametrize("url", ["s3://", "file://relative", "", "a\0b"])
def test_a_url_that_names_nothing_is_refused(url):
    with pytest.raises(DataError):
        open_store(url)
