# SPDX-License-Identifier: Apache-2.0
"""What stands above the pipeline: timing, benchmarks, the tuner, parity and load tests."""
