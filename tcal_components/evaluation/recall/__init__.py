"""Whether a model gives back what stands far above in the text: predicted token by token, and in answers that it writes."""
