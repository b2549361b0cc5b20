# SPDX-License-Identifier: Apache-2.0
"""How evenly a layer's tokens spread over its experts, counted while it serves.

A layer that is watched holds :class:`Counters`: two lines of sums on its device, tokens of each
expert and the router's scores of each expert. :func:`observe` adds a batch to them by an operator
that a CUDA graph captures; nothing is read by the host. The sums only grow, so a window is the
difference of two readings, and readings of ranks that counted different tokens add up.
"""

from __future__ import annotations
