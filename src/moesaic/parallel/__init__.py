"""Composing FSDP2, expert parallelism and expert-FSDP on an unmodified Hugging Face model."""
