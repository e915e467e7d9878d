"""Sharded checkpoints: a folder that any engine writes and reads at any number of ranks."""
