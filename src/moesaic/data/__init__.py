"""Data: formats, chat masking, packing, and loaders whose order doesn't depend on how many ranks read it."""

from __future__ import annotations

from moesaic.data.batch import IGNORE_INDEX, Batch, Sample, shift_labels
from moesaic.data.chat import Masking
from moesaic.data.loader import BatchLoader, EvalLoader
from moesaic.data.sft import (
    BadSample,
    DataReport,
    SftDataset,
    build_sft_dataset,
    build_sft_dataset_from_rows,
    choose_pad_token_id,
)

__all__ = [
    "IGNORE_INDEX",
    "BadSample",
    "Batch",
    "BatchLoader",
    "DataReport",
    "EvalLoader",
    "Masking",
    "Sample",
    "SftDataset",
    "build_sft_dataset",
    "build_sft_dataset_from_rows",
    "choose_pad_token_id",
    "shift_labels",
]
