"""The worlds of all engines, in the order of the matrix's columns."""

from matrix.worlds.kubernetes import KubernetesWorld
from matrix.worlds.local import LocalWorld
from matrix.worlds.pbs import PbsWorld
from matrix.worlds.slurm import SlurmWorld
from matrix.worlds.ssh import SshWorld

WORLDS = {
    world.name: world for world in (LocalWorld, SshWorld, SlurmWorld, PbsWorld, KubernetesWorld)
}
