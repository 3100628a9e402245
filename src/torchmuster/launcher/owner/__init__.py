"""The owner's tasks beyond runs on this machine: claim the head's port, continue in another job."""
