"""What `benchmarks/rendezvous.py` is made of: the head, the agents that call it, and torchrun's."""
