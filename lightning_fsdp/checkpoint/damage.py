"""The one error of its own that this package has."""


class DamagedCheckpoint(RuntimeError):  # noqa: N818 (what it is, as a noun)
    """A checkpoint that is not whole, or holds what may not be read; says which file or name."""
