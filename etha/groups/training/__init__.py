"""What a training loop uses over a group whose members come and go: DDP, batches, an optimizer, LocalSGD and DiLoCo."""
