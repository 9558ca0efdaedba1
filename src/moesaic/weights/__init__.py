"""Hugging Face weights, shard by shard: which keys fill what, loading, exporting."""

from moesaic.weights.export import export_hf
from moesaic.weights.load import LoadReport, load_weights

__all__ = ["LoadReport", "export_hf", "load_weights"]
