"""Training: one step, and what surrounds it."""
