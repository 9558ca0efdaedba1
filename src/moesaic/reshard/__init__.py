"""Trained weights into rollout engines, shard to shard: blocks, traced destinations, planned transfers, execution."""
