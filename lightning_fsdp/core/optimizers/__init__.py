"""What optimizers and gradient scalers do with slices."""
