"""Facts about a node, collected on the node: system, network, GPUs, files, stacks."""
