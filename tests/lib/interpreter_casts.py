# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter narrows floats wrongly: bf16 by truncation, e4m3 without the carry.

The GPU rounds to nearest even and saturates, as torch does; ``install()`` makes it do so too.
"""

import torch


def install() -> None:
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "_rounds_like_the_gpu", False):
        return
    original = interpreter._convert_float

    def convert(data, source, target, rounding):
        if source == tl.float32 and target in (tl.bfloat16, tl.float8e4nv):
            # the interpreter hands over either float32 or its bit pattern
            x = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            if target == tl.bfloat16:
                return x.bfloat16().view(torch.int16).numpy().view(np.uint16)
            return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return original(data, source, target, rounding)

    interpreter._convert_float = convert
    interpreter._rounds_like_the_gpu = True
