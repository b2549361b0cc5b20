# SPDX-License-Identifier: Apache-2.0
"""Measured kernel configurations, one JSON file per device; installed as ``moe_backend.tuned_configs``."""
