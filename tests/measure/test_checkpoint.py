# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what stands in the folder, that it repeats, and that nothing half appears."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from moe_backend import reference
from moe_backend.measure import checkpoint, model_presets, model_tensors
from moe_backend.measure.checkpoint import write_checkpoint

# Smaller than the preset: one expert block each way and a partial block in kv_a_proj.
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "n_routed_experts": 8,
    "vocab_size": 320,
}


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def tensors(folder):
    from safetensors.torch import load_file

    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        out.update(load_file(path))
    return out


def test_same_seed_same_bytes_other_seed_other_weights(tmp_path):
    one = write_checkpoint(tmp_path / "one", seed=3, **SMALL)
    two = write_checkpoint(tmp_path / "two", seed=3, **SMALL)
    other = write_checkpoint(tmp_path / "other", seed=4, **SMALL)
    assert digests(one) == digests(two)
    changed = {n for n in digests(one) if digests(one)[n] != digests(other)[n]}
    assert changed == {"model.safetensors", checkpoint.NOTE}


def test_tensors_are_complete_and_quantised_in_blocks(tmp_path):
    found = tensors(write_checkpoint(tmp_path / "m", **SMALL))
    down = "model.layers.1.mlp.experts.7.down_proj.weight"
    assert found[down].dtype is torch.float8_e4m3fn and found[down].shape == (256, 128)
    assert found[f"{down}_scale_inv"].shape == (2, 1)
    # 512 + 64 rows: the last block is half full
    assert found["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 2)
    assert found["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].dtype is torch.float32
    assert "model.layers.0.mlp.gate_proj.weight" in found  # the dense first layer
    scales = torch.cat([t.flatten() for n, t in found.items() if n.endswith("scale_inv")])
    assert scales.max() / scales.min() > 3, "equal scales would hide a shifted scale"
    codes = found[down].float()
    assert codes.isfinite().all() and codes.abs().max() == 448


def test_bf16_is_the_same_model_dequantised(tmp_path):
    quantized = tensors(write_checkpoint(tmp_path / "q", **SMALL))
    plain_folder = write_checkpoint(tmp_path / "p", weights="bf16", **SMALL)
    plain = tensors(plain_folder)
    assert "quantization_config" not in json.loads((plain_folder / "config.json").read_text())
    assert set(plain) == {n for n in quantized if not n.endswith("_scale_inv")}
    for name, value in plain.items():
        want = quantized[name]
        if want.dtype is torch.float8_e4m3fn:
            scale = quantized[f"{name}_scale_inv"]
            want = reference.dequant_blocks(want, scale).bfloat16()
        assert torch.equal(value, want), name


@pytest.mark.parametrize("preset", list(model_presets.PRESETS))
def test_every_preset_has_config_tokenizer_and_generation_settings(tmp_path, preset):
    folder = write_checkpoint(tmp_path / preset, preset, weights="none")
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = set(tokenizer["model"]["vocab"].values()) | {t["id"] for t in tokenizer["added_tokens"]}
    assert ids == set(range(config["vocab_size"])), "every id of the model decodes to text"
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == config["eos_token_id"]
    assert not list(folder.glob("*.safetensors"))


def test_full_size_presets_default_to_no_weights():
    assert checkpoint.default_weights("deepseek-r1") == "none"
    assert checkpoint.default_weights("tiny-qwen3-moe") == "fp8"


def test_qwen_lists_what_stays_unquantised():
    config = model_presets.build_config("tiny-qwen3-moe", {"num_hidden_layers": 2})
    skipped = config["quantization_config"]["modules_to_not_convert"]
    assert skipped == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    names = [s.name for s in model_tensors.plan(config) if s.kind == "matrix"]
    assert not [n for n in names if n.removesuffix(".weight") in skipped]


def test_text_survives_the_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_checkpoint(tmp_path / "m", weights="none")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("the server writes a block", "Zwölf Boxkämpfer 漢字 🙂", "  spaces\n\ttabs ", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|begin|>") == 0 and tokenizer.token_to_id("<|end|>") == 1


def test_large_model_is_sharded_with_an_index(tmp_path):
    folder = write_checkpoint(tmp_path / "m", max_shard_bytes=1_000_000, **SMALL)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(shards) > 1 and sorted(set(index.values())) == shards
    assert shards[0].endswith(f"-of-{len(shards):05d}.safetensors")
    whole = tensors(write_checkpoint(tmp_path / "whole", **SMALL))
    parts = tensors(folder)
    assert set(parts) == set(whole) == set(index)
    assert all(torch.equal(parts[n].view(torch.uint8), whole[n].view(torch.uint8)) for n in whole)


def test_next_token_layer_is_written_when_asked(tmp_path):
    found = tensors(write_checkpoint(tmp_path / "m", num_nextn_predict_layers=1, **SMALL))
    assert "model.layers.2.eh_proj.weight" in found
    assert "model.layers.2.mlp.experts.0.up_proj.weight" in found


def test_equal_wish_is_met_without_writing(tmp_path):
    folder = write_checkpoint(tmp_path / "m", **SMALL)
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    write_checkpoint(folder, **SMALL)
    assert before == {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    (folder / "model.safetensors").write_bytes(b"cut off")
    write_checkpoint(folder, **SMALL)
    assert len(tensors(folder)) > 10, "a damaged folder is written again"
    write_checkpoint(folder, seed=9, **SMALL)
    assert checkpoint.read_note(folder).seed == 9


def test_foreign_folder_is_refused_and_untouched(tmp_path):
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not written by make-checkpoint"):
        write_checkpoint(tmp_path, **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["diary.txt"]
    with pytest.raises(FileExistsError, match="is a file"):
        write_checkpoint(tmp_path / "diary.txt", **SMALL)


@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
def test_interrupt_leaves_nothing_half(tmp_path, existing):
    """Ctrl-C in the middle once left a folder that looked complete to the next run."""
    target = tmp_path / "m"
    if existing:
        write_checkpoint(target, weights="none", **SMALL)
    before = digests(target) if existing else None

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(target, seed=1, progress=interrupt, **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == (["m"] if existing else [])
    if existing:
        assert digests(target) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 512}, "did you mean hidden_size"),
        ({"hidden_size": "wide"}, "expected a value like 512"),
        ({"hidden_size": 512.5}, "expected a value like 512"),
        ({"hidden_size": -1}, "positive"),
        ({"num_experts_per_tok": 99}, "more than the 32 experts"),
        ({"n_group": 5}, "does not divide"),
        ({"n_group": 8, "topk_group": 1, "num_experts_per_tok": 8}, "cannot hold top-8"),
        ({"vocab_size": 100}, "no room for 256 bytes"),
        ({"quantization_config.weight_block_size": [128]}, r"expected \[rows, columns\]"),
        ({"quantization_config.weight_block_size": None}, "use weights='none'"),
        ({"quantization_config.block": 1}, "no field"),
    ],
)
def test_bad_fields_are_refused_with_a_message(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "m", **overrides)
    assert not list(tmp_path.iterdir())


def test_unknown_preset_and_weights(tmp_path):
    with pytest.raises(ValueError, match="known: tiny-deepseek"):
        write_checkpoint(tmp_path / "m", "llama")
    with pytest.raises(ValueError, match="fp8, bf16, none"):
        write_checkpoint(tmp_path / "m", weights="int4")


def test_transformers_reads_the_bf16_model(tmp_path):
    """Guards tensor names and shapes: a missing or surplus one is reported by transformers."""
    transformers = pytest.importorskip("transformers")
    for preset, extra in (
        ("tiny-deepseek", SMALL),
        ("tiny-qwen3-moe", {"num_hidden_layers": 1, "num_experts": 4}),
    ):
        folder = write_checkpoint(tmp_path / preset, preset, weights="bf16", **extra)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        logits = model(torch.arange(2, 34)[None]).logits.float()
        assert logits.isfinite().all()
        assert logits.argmax(-1).unique().numel() > 8, "degenerate: the same token everywhere"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        chat = [{"role": "user", "content": "hello"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text.endswith("<|assistant|>")
