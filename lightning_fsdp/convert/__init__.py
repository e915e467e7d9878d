"""Converts checkpoints: ``python -m lightning_fsdp.convert --help``."""
