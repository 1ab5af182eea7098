"""``pytest tests/fuzz --hypothesis-profile=long``: the same tests with fresh examples, many more of them."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "long",
    max_examples=4000,
    derandomize=False,
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
