"""`verify_every`: a step is made again on another rank, and the two are compared bit for bit."""
