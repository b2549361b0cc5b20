# SPDX-License-Identifier: Apache-2.0
"""Which kernel configuration runs a shape, and why."""
