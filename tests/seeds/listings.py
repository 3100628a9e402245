"""The listings, and what a test changes in them: every change is named, and has to be there."""

from pathlib import Path

HERE = Path(__file__).parent

# GPUs become the CPU.
ON_CPU = [
    ('    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', ""),
    ('backend="nccl"', 'backend="gloo"'),
    ("model.to(self.gpu_id)", "model"),
    ("DDP(self.model, device_ids=[self.gpu_id])", "DDP(self.model)"),
    ('loc = f"cuda:{self.gpu_id}"', 'loc = "cpu"'),
    ("            source = source.to(self.gpu_id)\n", ""),
    ("            targets = targets.to(self.gpu_id)\n", ""),
    ("pin_memory=True", "pin_memory=False"),
]
# "The only changes that we might want to do here": from `multi_gpu.py` to the script for many nodes.
MANY_NODES = [
    ("gpu_id", "local_rank"),
    (
        '        self.local_rank = int(os.environ["LOCAL_RANK"])\n',
        """        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
""",
    ),
    ('f"[GPU{self.local_rank}] Epoch', 'f"[GPU{self.global_rank}] Epoch'),
]


def listing(name, *tables):
    """Return a listing with the changes of these tables."""
    text = (HERE / name).read_text()
    for table in tables:
        for old, new in table:
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
    return text


def put_script(folder, name):
    """Write the script for many nodes, and its data, into a folder."""
    (folder / name).write_text(listing("eap/multi_gpu.py.txt", ON_CPU, MANY_NODES))
    (folder / "datautils.py").write_text(listing("eap/datautils.py.txt"))
