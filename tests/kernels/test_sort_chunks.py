# SPDX-License-Identifier: Apache-2.0
"""Chunks in another order and back, exact, in poisoned memory."""

import pytest
import torch

from moe_backend import reference_training as oracle


@pytest.mark.parametrize(("chunks", "spare"), [(1, 0), (6, 0), (9, 7), (300, 3)])
def test_round_trip(chunks, spare, device, poisoned_memory):
    from moe_backend.kernels.sort_chunks import chunk_sources, sort_chunks

    sizes, order = torch.randint(0, 3, (chunks,)), torch.randperm(chunks)
    total = int(sizes.sum())
    source = chunk_sources(sizes.to(device), order.to(device), total + spare)
    assert torch.equal(source.cpu(), oracle.chunk_sources(sizes, order, total + spare))
    x, probs = torch.randn(total + spare, 40, device=device), torch.rand(total + spare).to(device)
    out, moved = sort_chunks(x, source, probs)
    parts = x[:total].split(sizes.tolist())
    assert torch.equal(out[:total], torch.cat([parts[i] for i in order]))
    assert not out[total:].any() and not moved[total:].any()
    back, home = sort_chunks(out, source, moved, back=True)
    assert torch.equal(back[:total], x[:total]) and torch.equal(home[:total], probs[:total])
    assert not back[total:].any() and not home[total:].any()
