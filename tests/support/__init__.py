"""What the tests share: ranks, models, references, memory and traffic meters."""
