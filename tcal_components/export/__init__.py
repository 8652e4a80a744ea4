"""A student as a Hugging Face folder, and back."""
