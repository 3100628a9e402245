"""The user's sites for commands: from `muster.toml` files, and from other packages."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmuster.launcher.spec.site import Site, Sites


def my_sites() -> "Sites":
    """Return all sites for `--on`; print a note to standard error for each ignored file.

    Raises:
        ManyErrors: All problems of the files.
    """
    from torchmuster.core.cli.messages import print_notes
    from torchmuster.launcher.engines.registry import schedulers
    from torchmuster.launcher.spec.site import load_sites
    from torchmuster.launcher.spec.site_files import is_new

    sites = load_sites(os.getcwd(), os.environ, schedulers())
    print_notes([note for note in sites.notes if is_new(note)])
    return sites


def nodes_of_site(site: "Site", *, spares: int = 0) -> str | None:
    """Return a site's value of `--nodes`: by default all ssh hosts but the spare ones."""
    if site.nodes is None:
        from torchmuster.launcher.spec.site import site_hosts

        return str(max(len(site_hosts(site)) - spares, 1)) if site.kind == "ssh" else None
    least, most = site.nodes
    return str(most) if least == most else f"{least}:{most}"
