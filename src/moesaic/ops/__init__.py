"""Tensors in, tensors out: permutations, exchanges, grouped matmuls, placements arithmetic, device-to-host reads."""
