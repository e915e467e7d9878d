"""The essential path: gather, compute, reduce. It imports nothing of the folders beside it."""
