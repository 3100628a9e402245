"""What a task's command sees: mounts, containers, private networks. Standard library only."""
