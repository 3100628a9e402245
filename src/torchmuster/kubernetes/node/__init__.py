"""A small sshd for pods, of the standard library only: key holders can run commands with pipes."""
