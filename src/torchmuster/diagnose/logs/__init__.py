"""What a user gives to `muster explain`: files, folders, archives, streams, and the job's script. Nodes need none of it."""
