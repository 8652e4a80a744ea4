"""Speed and memory of training steps with random weights."""
