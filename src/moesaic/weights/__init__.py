"""Hugging Face weights, shard by shard: which keys fill what, loading, exporting."""

from moesaic.weights.export import export_hf
from moesaic.weights.files import find_weights
from moesaic.weights.full_state import load_full_state_dict
from moesaic.weights.load import LoadReport, load_weights
from moesaic.weights.source import match_folder, remember_source
from moesaic.weights.stream import stream_hf_tensors

__all__ = [
    "LoadReport",
    "export_hf",
    "find_weights",
    "load_full_state_dict",
    "load_weights",
    "match_folder",
    "remember_source",
    "stream_hf_tensors",
]
