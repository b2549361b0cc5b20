# SPDX-License-Identifier: Apache-2.0
"""Exact, bucket, heuristic: which one, and that the reason says so."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_backend.support import supports_config
from moe_backend.tuning import schema, selection, space
from moe_backend.tuning.heuristics import heuristic
from moe_backend.types import GemmConfig, KernelConfig, MoEShape

SHAPE = MoEShape(64, 64, 1024, 256, 4)
DEVICE = "Test GPU"


def entry(tokens, align, shape=SHAPE, load="uniform", **config):
    choice = KernelConfig(align, up=GemmConfig(num_stages=3), **config)
    return schema.entry(shape, tokens, load, choice, 10.0, triton="3.6.0", torch="2.11")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_BACKEND_CONFIG_DIR", str(tmp_path))

    def write(*entries):
        path = tmp_path / schema.file_name(DEVICE)
        schema.save(path, schema.ConfigFile(device=DEVICE, entries=list(entries)))
        for cached in (selection._entries, selection._select):
            cached.cache_clear()

    return write


def test_exact_then_bucket_then_heuristic(files):
    files(entry(1, 16, direct=True), entry(64, 32), entry(1024, 64))
    exact = selection.select(SHAPE, 64, DEVICE)
    assert (exact.source, exact.config.align) == ("exact", 32)
    near = selection.select(SHAPE, 700, DEVICE)
    assert (near.source, near.config.align) == ("bucket", 64) and "1024" in near.reason
    other = selection.select(MoEShape(64, 64, 1024, 384, 4), 64, DEVICE)
    assert other.source == "heuristic" and "no entry" in other.reason
    assert other.config == heuristic(MoEShape(64, 64, 1024, 384, 4), 64)


def test_a_rank_of_expert_parallelism_uses_entries_of_its_weights(files):
    """What decides is how many routes stay on the rank, not how many tokens there are."""
    files(entry(64, 32), entry(1024, 64))
    spread = MoEShape(512, 64, 1024, 256, 4, ep_size=8)  # an eighth of the routes stays
    found = selection.select(spread, 8192, DEVICE)
    assert (found.source, found.config.align) == ("bucket", 64)
    assert "same weights on a rank" in found.reason


def test_the_direct_path_is_never_stretched(files):
    """It reads an expert's weights once for every route: right for few, ruinous for many."""
    files(entry(4, 16, direct=True))
    assert selection.select(SHAPE, 3, DEVICE).config.direct
    beyond = selection.select(SHAPE, 900, DEVICE)
    assert beyond.source == "heuristic" and not beyond.config.direct


def test_load_profiles_do_not_mix(files):
    files(entry(64, 32), entry(64, 64, load="zipf"))
    assert selection.select(SHAPE, 64, DEVICE).config.align == 32
    assert selection.select(SHAPE, 64, DEVICE, load="zipf").config.align == 64


def test_a_broken_file_of_the_user_is_an_error(files, tmp_path):
    files(entry(64, 32))
    (tmp_path / schema.file_name(DEVICE)).write_text("{}")
    selection._entries.cache_clear()
    with pytest.raises(schema.ConfigFileError):
        selection.select(SHAPE, 64, DEVICE)


def test_without_cuda_there_is_still_an_answer():
    assert selection.select(SHAPE, 64, torch.device("cpu")).source == "heuristic"


@given(
    experts=st.sampled_from([1, 8, 64, 256, 512]),
    ep=st.sampled_from([1, 4, 8]),
    hidden=st.sampled_from([1024, 2048, 7168, 8192]),
    inter=st.sampled_from([64, 80, 192, 256, 704, 1408, 2048, 4096]),
    top_k=st.integers(1, 22),
    tokens=st.integers(0, 200_000),
)
@settings(max_examples=200, deadline=None)
def test_the_heuristic_is_always_legal(experts, ep, hidden, inter, top_k, tokens):
    local = max(1, experts // ep)
    shape = MoEShape(experts, local, hidden, inter, min(top_k, experts), ep_size=ep)
    assert supports_config(heuristic(shape, tokens), shape).ok


@pytest.mark.parametrize("tokens", [1, 16, 256, 8192])
def test_the_search_space_is_legal_and_small(tokens):
    for shape in (SHAPE, MoEShape(32, 32, 7168, 192, 1)):
        count = 0
        for group in space.groups(shape, tokens):
            for up in group.ups:
                for down in group.downs:
                    assert supports_config(group.config(up, down), shape).ok
            count += len(group.ups) + len(group.downs)
        assert 0 < count <= 40
