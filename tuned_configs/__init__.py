# SPDX-License-Identifier: Apache-2.0
"""Measured kernel configurations, one JSON file per device (``moe_backend.tuned_configs``)."""
