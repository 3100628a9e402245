"""What the checks run in workers: each script reports facts by `gpu.say`, and the kit compares them."""
