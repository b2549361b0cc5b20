# SPDX-License-Identifier: Apache-2.0
"""Recording expert blocks with hooks, on plain modules shaped like the engine's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from moe_backend.measure.parity_capture import PARTS, Recorder, blocks_of, layer_number


class Gate(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x), None  # the engine's linear layers return (output, bias)


class Block(torch.nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.gate, self.experts = Gate(8, 4), torch.nn.Linear(8, 8)
        self.shared_experts = torch.nn.Linear(8, 8) if shared else None

    def forward(self, x):
        self.gate(x)
        out = self.experts(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        x.zero_()  # an engine may write over its input
        return out


def model(shared=True):
    layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(3)])
    layers[0].mlp = torch.nn.Linear(8, 8)
    layers[1].mlp, layers[2].mlp = Block(shared), Block(shared)
    return torch.nn.ModuleDict({"layers": layers})


def test_blocks_are_found_by_their_parts():
    assert list(blocks_of(model())) == [1, 2]
    assert layer_number("model.layers.17.mlp.experts") == 17 and layer_number("lm_head") == -1


@pytest.mark.parametrize("shared", [True, False])
@torch.inference_mode()
def test_what_passes_is_kept_up_to_the_limit(shared):
    block = blocks_of(model(shared))[2]
    recorder = Recorder(block, 5)
    sent = [torch.randn(3, 8), torch.randn(4, 8)]
    seen = [block(x.clone()) for x in sent]
    taken = recorder.close()
    assert set(taken) == set(PARTS) - (set() if shared else {"shared"})
    assert all(part.shape[0] == 5 for part in taken.values())
    assert torch.equal(taken["x"], torch.cat(sent)[:5]), "copied before the engine wrote over it"
    assert torch.equal(taken["out"], torch.cat(seen)[:5])
    assert taken["logits"].shape == (5, 4)
    assert not block._forward_hooks and not block._forward_pre_hooks, "hooks are left behind"
