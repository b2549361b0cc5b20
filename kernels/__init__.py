# SPDX-License-Identifier: Apache-2.0
"""GPU kernels, one operation a file (``moe_backend.kernels``). Importing this does nothing."""
