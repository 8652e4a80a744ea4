"""Which layers keep their attention."""
