"""What a training step takes on more nodes, predicted from measurements. Standard library only."""
