"""What is refused, what nobody used, and what an exception leaves behind."""
