"""Profiles: 100 fixed cases by default, 2 000 new ones with ``pytest tests/fuzz --hypothesis-profile=full``."""

from hypothesis import settings

settings.register_profile("full", max_examples=2000, print_blob=True)
