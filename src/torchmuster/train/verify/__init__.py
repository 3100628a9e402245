"""`verify_every`: repeats a step on another rank and compares the two bit for bit."""
