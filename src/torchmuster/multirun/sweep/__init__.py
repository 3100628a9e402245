"""The core of sweeps: plans, members, the owner, slots, and rules that stop members early."""
