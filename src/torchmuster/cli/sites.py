"""The user's sites for commands: `muster.toml` from the working directory on, with what other packages bring."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmuster.spec.sites.site import Sites


def my_sites() -> "Sites":
    """Return what `--on` can name here; files that are left alone are said on standard error.

    Raises:
        ManyErrors: Everything that is wrong with the files.
    """
    from torchmuster.engines.registry import schedulers
    from torchmuster.spec.sites.files import is_new
    from torchmuster.spec.sites.site import load_sites
    from torchmuster.ui.messages import print_notes

    sites = load_sites(os.getcwd(), os.environ, schedulers())
    print_notes([note for note in sites.notes if is_new(note)])
    return sites
