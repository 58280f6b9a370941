"""What every training run shares: the loop, losses, optimisers, devices, checkpoints."""
