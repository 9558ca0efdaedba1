"""Comparing what two runs left behind."""
