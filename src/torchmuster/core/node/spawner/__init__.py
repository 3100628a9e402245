"""The spawner: the job's interpreter, which imports torch once and forks the workers."""
