"""What every training run shares: the loop, losses, optimizers, devices, checkpoints."""
