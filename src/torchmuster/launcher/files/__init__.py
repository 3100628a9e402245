"""Packing what is sent to nodes: torchmuster itself, the code folder, virtual environments."""
