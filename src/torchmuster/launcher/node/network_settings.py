"""What a node says of its networks, and the variables that make Gloo and NCCL use the chosen one."""

import os
from collections.abc import Mapping

from torchmuster.core.model.network import GLOO, NCCL, TENSORPIPE, VARIABLES
from torchmuster.core.net import messages
from torchmuster.core.net.address import link_names, own_interfaces

_MAX_VALUE = 200
_MAX_FILE_BYTES = 64 << 10


def network_facts(
    survey: int, ports: tuple[int, ...], environment: Mapping[str, str], local_addr: str | None
) -> messages.NetworkFacts:
    """Return this node's interfaces, and what the user has set himself.

    With `local_addr`, the address that the user names for this node, only its interface counts.
    """
    interfaces = own_interfaces()
    if local_addr is not None:
        interfaces = tuple(i for i in interfaces if i.address == local_addr) or interfaces
    return messages.NetworkFacts(
        survey=survey,
        ports=ports,
        interfaces=interfaces,
        names=link_names(),
        variables={
            name: environment[name][:_MAX_VALUE] for name in VARIABLES if environment.get(name)
        },
    )


def network_variables(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name an interface; what the user or the site has set is kept."""
    # NCCL takes prefixes unless told that the name is exact; Gloo and TensorPipe know plain names only.
    wanted = {GLOO: interface, NCCL: f"={interface}", TENSORPIPE: interface}
    kept = {name for name in VARIABLES if name in environment}
    if _is_in_nccl_file(environment):
        kept.add(NCCL)
    return {name: value for name, value in wanted.items() if name not in kept}


def _is_in_nccl_file(environment: Mapping[str, str]) -> bool:
    """Say whether a file of NCCL's names the interface; a variable would silently win over it."""
    own = environment.get("NCCL_CONF_FILE") or os.path.join(
        environment.get("HOME", "/"), ".nccl.conf"
    )
    for path in (own, "/etc/nccl.conf"):
        try:
            with open(path, errors="replace") as file:
                lines = file.read(_MAX_FILE_BYTES).splitlines()
        except OSError:
            continue
        if any(line.strip().startswith(f"{NCCL}=") for line in lines):
            return True
    return False
