"""Data: formats, chat masking, packing, and loaders whose order doesn't depend on how many ranks read it."""

from __future__ import annotations

from moesaic.data.batch import IGNORE_INDEX, Batch, Sample, shift_labels
from moesaic.data.chat import Masking
from moesaic.data.dataset import (
    BadSample,
    DataReport,
    TokenizedDataset,
    build_dataset,
    build_dataset_from_rows,
    choose_pad_token_id,
)
from moesaic.data.loader import BatchLoader, EvalLoader
from moesaic.data.mixing import MixedDataset
from moesaic.data.streaming import StreamedBadSample, StreamLoader, StreamSource, build_stream_source
from moesaic.data.token_batches import TokenBatchLoader, TokenEvalLoader

__all__ = [
    "IGNORE_INDEX",
    "BadSample",
    "Batch",
    "BatchLoader",
    "DataReport",
    "EvalLoader",
    "Masking",
    "MixedDataset",
    "Sample",
    "StreamLoader",
    "StreamSource",
    "StreamedBadSample",
    "TokenBatchLoader",
    "TokenEvalLoader",
    "TokenizedDataset",
    "build_dataset",
    "build_dataset_from_rows",
    "build_stream_source",
    "choose_pad_token_id",
    "shift_labels",
]
