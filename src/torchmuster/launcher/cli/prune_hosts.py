"""`muster prune --hosts`: the environments that were sent to hosts of ssh."""

import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.errors import ManyErrors, UsageError

if TYPE_CHECKING:
    from torchmuster.launcher.engines.ssh_command import HostProblem
    from torchmuster.launcher.engines.ssh_host import RemoteHost


@dataclass(frozen=True, slots=True)
class PrunedHost:
    """What was removed on a host, or would be."""

    host: str
    paths: tuple[str, ...]
    size_bytes: int


def prune_hosts(
    hosts: str, older_s: float, most_bytes: int | None, *, dry_run: bool
) -> list[PrunedHost]:
    """Remove the environments that nobody uses on hosts, or say which they are.

    Args:
        hosts: As `--hosts` has them, or the name of a site of kind ssh.
        older_s: Those that were not used for so long.
        most_bytes: And the oldest beyond so many bytes.
        dry_run: Remove nothing.

    Raises:
        ManyErrors: Hosts can't be used; the others were asked.
    """
    from torchmuster.core.files.layout import RunDir
    from torchmuster.launcher.cli.sites import my_sites
    from torchmuster.launcher.cli.ssh import KIND, find_ssh_site, make_bundle_for, make_wishes
    from torchmuster.launcher.engines.ssh_command import HostProblem
    from torchmuster.launcher.engines.ssh_host import HostError, RemoteHost, in_parallel
    from torchmuster.launcher.net.remote_messages import EnvironmentsPruned, PruneEnvironments

    is_site = hosts in my_sites().sites
    site = find_ssh_site(hosts if is_site else KIND, None if is_site else hosts, None)
    if site is None:
        raise UsageError(f"`{hosts}` is no site of kind ssh", where="--hosts")
    wishes = make_wishes(site, by_slots=False)
    bundle = make_bundle_for((sys.executable,), wishes)
    question = PruneEnvironments(
        older_s=older_s, most_bytes=most_bytes, dry_run=dry_run, scratch=site.scratch
    )

    def ask(host: "RemoteHost") -> "PrunedHost | HostProblem":
        try:
            host.open()
            said = host.ask(question, EnvironmentsPruned)
        except HostError as error:
            return error.problem
        finally:
            host.close()
        return PrunedHost(host.host.name, said.paths, said.size_bytes)

    with tempfile.TemporaryDirectory(prefix="muster-prune-") as folder:
        sessions = [RemoteHost(one, bundle, RunDir(folder)) for one in wishes.hosts]
        answers = in_parallel(ask, sessions)
    bad = [answer for answer in answers if isinstance(answer, HostProblem)]
    if bad:
        raise ManyErrors(
            [UsageError("a host can't be asked", where=b.host, why=b.words, fix=b.fix) for b in bad]
        )
    return [answer for answer in answers if isinstance(answer, PrunedHost)]
