"""What is refused, and what nobody used."""
