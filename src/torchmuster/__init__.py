"""torchmuster: take a PyTorch training script from one GPU to many nodes."""

__version__ = "0.1.0"
