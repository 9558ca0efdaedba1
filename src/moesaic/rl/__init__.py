"""Reinforcement learning: roles on their own meshes, one loop, algorithms as data."""
