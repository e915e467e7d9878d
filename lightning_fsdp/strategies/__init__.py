"""Lightning strategies over the engines of this package."""
