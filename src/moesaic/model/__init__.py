"""Hugging Face models on meta, and their storage."""
