"""Etha: tensors between two PyTorch jobs, from any layout to any layout. Public names, nothing else."""

__version__ = "0.1.0.dev0"
