"""``pytest tests/fuzz --hypothesis-profile=long``: fresh examples, and more of them (`mutations.examples`)."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("long")
