# SPDX-License-Identifier: Apache-2.0
"""GPU kernels, one operation a file; installed as ``moe_backend.kernels``. Importing this does nothing."""
