"""How the embedded teacher was made."""
