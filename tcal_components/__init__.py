"""Components of the Taylor-Calibrate plugin for torchtune: Transformer teachers, hybrid students and what joins them."""

__version__ = "0.1.0"
