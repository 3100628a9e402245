"""What a task's command sees of files and network: mounts, containers, private networks. Standard library only."""
