"""How much is tried: hypothesis' examples per property, and whether long tests run.

HYPOTHESIS_PROFILE=ci (default): 100 examples, no tests marked `nightly`.
HYPOTHESIS_PROFILE=nightly: 10,000, and all tests.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

NIGHTLY = "nightly"
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

for name, max_examples in (("ci", 100), (NIGHTLY, 10_000)):
    settings.register_profile(
        name, max_examples=max_examples, deadline=None, suppress_health_check=SLOW
    )
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PROFILE == NIGHTLY:
        return
    for item in items:
        if item.get_closest_marker(NIGHTLY):
            item.add_marker(pytest.mark.skip(reason="runs with bash tests/run.sh nightly"))
