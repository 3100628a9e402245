"""What the search weighs: pages that answer more than they mention, and the words that people have for them.

A guide says how; the reference, the design and the walks through the code name the same things more often, and would stand above it.
"""

GUIDE, ERROR = 3.0, 1.0
# Pages that are right for few of those who search.
WEIGHTS: dict[str, float] = {
    "cli": 0.5,
    "comparison": 0.5,
    "core": 0.3,
    "design": 0.3,
    "errors/index": 0.1,
    "glossary": 0.3,
    "how-it-works": 0.5,
    "inside": 0.3,
    "matrix": 0.3,
    "plugging-in": 0.3,
    "python-reference": 0.5,
    "resources": 0.5,
    "train-reference": 0.5,
    "workers": 0.5,
    "workflow-format": 0.5,
    "writing-an-engine": 0.3,
}
# Words that people search for and a page answers, also where it calls the thing otherwise. They stand beside the hit.
WORDS: dict[str, tuple[str, ...]] = {
    "agents": ("--json", "scripts"),
    "data": ("shuffle", "data loader"),
    "datasets": ("S3", "bucket"),
    "debugging": ("pdb", "breakpoint", "debugpy", "VS Code"),
    "doctor": ("muster doctor",),
    "environments": ("conda", "container", "virtual environment"),
    "explain": ("muster explain", "error message"),
    "faq": ("progress bar",),
    "faults": ("SIGKILL", "kill a worker", "stop a run"),
    "first-run": ("install", "pip", "kill a worker"),
    "from-srun": ("slurm",),
    "hangs": ("NCCL timeout", "NCCL_DEBUG", "stuck", "slow rank"),
    "kubernetes": ("k8s", "pods"),
    "lint": ("muster lint",),
    "long-jobs": ("requeue", "--resubmit", "time limit"),
    "metrics": ("TensorBoard", "Weights & Biases", "wandb", "MLflow"),
    "network": ("InfiniBand", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"),
    "python": ("Jupyter", "notebook"),
    "run": (
        "muster run",
        "--nodes",
        "multi-node",
        "--max-restarts",
        "--detach",
        "logs",
        "stop a run",
    ),
    "sites": ("Slurm", "PBS", "sbatch", "qsub", "muster.toml"),
    "snapshots": ("checkpoint", "FSDP", "spot instances", "preemption"),
    "start": ("multi-node", "install"),
    "sweeps": ("hyperparameter search", "learning rate"),
    "top": ("muster top", "progress"),
    "torchrun": ("nproc-per-node", "--rdzv-endpoint", "--max-restarts"),
    "train": ("resume", "FSDP", "DDP"),
    "workflows": ("pipeline",),
}
