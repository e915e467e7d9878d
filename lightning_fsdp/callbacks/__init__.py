"""What a training run shows of its gradients, its memory and its time, under every strategy."""
