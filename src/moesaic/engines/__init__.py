"""Rollout engines behind one protocol. An optional engine's package is imported in its own file only."""
