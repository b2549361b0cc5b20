# SPDX-License-Identifier: Apache-2.0
"""The ``moe-backend`` command: thin, over measure/ and vllm_plugin/."""
