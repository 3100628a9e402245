"""A pod as a host: who proves the run's key gets a command run there, with its pipes, as by ssh. Standard library only."""
