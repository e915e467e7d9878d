"""What operations do with sharded tensors."""
