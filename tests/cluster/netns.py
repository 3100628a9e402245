"""Nodes with several networks each, and the switch between them.

switch     the far ends of all links: one bridge for the fast network, none for the others
node K     hsn0 10.10.0.K/24 on the bridge; mgmt0 192.168.50.K/24 that leads nowhere; docker0 172.17.0.1/16
"""

from kit.namespaces import HeldNetworks


class Nodes(HeldNetworks):
    """A switch, which is number 0, and some nodes, from 1."""

    def __init__(self, num_nodes):
        super().__init__(num_nodes + 1)
        self.num_nodes = num_nodes

    def connect(self):
        """Give every node its three networks."""
        self.ip(0, "link add fast type bridge", "link set fast up", "link set lo up")
        for node in range(1, self.num_nodes + 1):
            self._connect(node)

    def _connect(self, node):
        pid = self.pids[node]
        self.ip(
            0,
            f"link add fast{node} type veth peer name hsn0 netns {pid}",
            f"link set fast{node} master fast up",
            f"link add mgmt{node} type veth peer name mgmt0 netns {pid}",
            f"link set mgmt{node} up",
        )
        self.ip(
            node,
            "link set lo up",
            f"addr add 10.10.0.{node}/24 dev hsn0",
            "link set hsn0 up",
            f"addr add 192.168.50.{node}/24 dev mgmt0",
            "link set mgmt0 up",
            "link add docker0 type bridge",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        )
