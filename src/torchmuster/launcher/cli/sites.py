"""The user's sites for commands: of `muster.toml`, other packages, `--hosts` and `--hostfile`."""

import os
from typing import TYPE_CHECKING, Any

from torchmuster.errors import ManyErrors, UsageError

if TYPE_CHECKING:
    from torchmuster.launcher.engines.ssh import SshOptions
    from torchmuster.launcher.engines.ssh_host import Bundle
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


KIND = "ssh"


def find_ssh_site(name: str, hosts: str | None, hostfile: str | None) -> "Site | None":
    """Return the ssh site of the run; None if the run goes elsewhere.

    Raises:
        UsageError: Hosts are named for another kind of engine, or missing.
        ManyErrors: All problems of the hosts.
    """
    from torchmuster.launcher.spec.site import Site

    named_here = bool(hosts or hostfile)
    sites = my_sites()
    site = sites.sites.get(name)
    if site is None and name == KIND:
        values = {key: field.get_default() for key, field in Site.model_fields.items()}
        site = Site.model_construct(**{**values, "name": KIND, "kind": KIND})
    if site is None or site.kind != KIND:
        if named_here:
            what = f"`--on {name}` takes no list of hosts"
            raise UsageError(what, where="--hosts", fix="--on ssh --hosts node1,node2")
        return None
    if named_here:
        site = site.model_copy(update={"hosts": _hosts_of(hosts, hostfile), "hostfile": None})
    if not site.hosts and site.hostfile is None:
        fix = '--hosts node1,node2:4, --hostfile FILE, or [engines.NAME] with kind = "ssh"'
        raise UsageError("no hosts are given", where=f"--on {name}", fix=fix)
    return site


def _hosts_of(hosts: str | None, hostfile: str | None) -> Any:
    from torchmuster.launcher.spec.site_files import join_hosts, parse_host, read_hostfile

    if hosts and hostfile:
        raise UsageError("`--hosts` and `--hostfile` are both given: use one of them")
    if hostfile:
        return read_hostfile(hostfile)
    found, errors = [], []
    for word in (hosts or "").split(","):
        try:
            found.append(parse_host(word))
        except UsageError as error:
            errors.append(UsageError(error.what, where=f"--hosts {hosts}", fix=error.fix))
    if errors:
        raise ManyErrors(errors)
    return join_hosts(found)


def make_wishes(site: "Site", *, by_slots: bool) -> "SshOptions":
    """Return how to reach and use the hosts of a site."""
    from torchmuster.launcher.engines.ssh import SshOptions
    from torchmuster.launcher.engines.ssh_command import SshHost
    from torchmuster.launcher.spec.site import site_hosts

    hosts = tuple(
        SshHost(name=h.name, user=h.user or site.user, port=site.port, slots=h.slots)
        for h in site_hosts(site)
    )
    shared = os.environ.get("MUSTER_SSH_SHARED", "") != "no"
    where = f"--on {site.name}" if site.name != KIND else "--on ssh"
    return SshOptions(hosts=hosts, where=where, by_slots=by_slots, may_share=shared)


def make_bundle_for(own_pythons: "tuple[str, ...]", wishes: "SshOptions") -> "Bundle":
    """Return what hosts are offered; they try these interpreters of this machine first."""
    from torchmuster.launcher.engines.ssh_command import ssh_command
    from torchmuster.launcher.engines.ssh_host import make_bundle

    pythons = [*filter(None, [os.environ.get("MUSTER_SSH_PYTHON")]), *own_pythons]
    return make_bundle(ssh_command(os.environ), pythons, may_share=wishes.may_share)
