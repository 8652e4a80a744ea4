"""What the teacher's attention does on calibration text: capture, streaming sums, statistics."""
