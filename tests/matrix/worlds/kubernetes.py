"""A cluster of Kubernetes; to be made when the engine for it exists."""

from matrix.world import World


class KubernetesWorld(World):
    """`muster run --on kubernetes`: its column is not run until `why_not` returns None."""

    name, title = "kubernetes", "Kubernetes"
    made_of = "not made yet"
    options = ("--on", "kubernetes", "--nodes", "2")

    def __init__(self, folder):
        self.folder, self.home = folder, folder / "home"

    def why_not(self):
        return "there is no engine for Kubernetes yet"
