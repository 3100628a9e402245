"""What runs on a host that is reached by ssh, at the other end of the session. Standard library only."""
