"""What unit tests of the core share."""

import pytest

from torchmuster.core.files.disk import DiskWriter


@pytest.fixture
def disk():
    """A writer whose losses nobody hears of."""
    writer = DiskWriter()
    writer.start()
    yield writer
    writer.flush(5.0)
