# SPDX-License-Identifier: Apache-2.0
"""What is legal, and that every refusal says why and what to do."""

import pytest

from moe_backend import MoEShape, RouterSpec, support

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_devices_that_run(capability):
    assert support.supports_device(capability)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_devices_that_do_not(capability):
    answer = support.supports_device(capability)
    assert not answer and "Hopper" in answer.reason and "sm_" in answer.reason


def test_a_block_fp8_checkpoint_is_taken():
    assert support.supports_checkpoint(FP8)


@pytest.mark.parametrize(
    "config, word",
    [
        (None, "no quantization_config"),
        ({**FP8, "quant_method": "awq"}, "'awq'"),
        ({k: v for k, v in FP8.items() if k != "weight_block_size"}, "per-tensor"),
        ({**FP8, "weight_block_size": [64, 128]}, "[64, 128]"),
        ({**FP8, "activation_scheme": "static"}, "'static'"),
    ],
)
def test_other_checkpoints_are_refused(config, word):
    answer = support.supports_checkpoint(config)
    assert not answer and word in answer.reason and "checkpoint" in answer.reason


def test_tensor_parallel_that_cuts_a_block_names_a_size_that_does_not():
    assert support.supports_tensor_parallel(7168, 2048, 8)
    answer = support.supports_tensor_parallel(2048, 768, 4)
    assert not answer and "192" in answer.reason and "size of 3" in answer.reason
    assert support.supports_tensor_parallel(2048, 192, 1)


@pytest.mark.parametrize(
    "shape, word",
    [
        (MoEShape(8, 8, 200, 128, 2), "hidden size 200"),
        (MoEShape(8, 8, 256, 100, 2), "intermediate size 100"),
        (MoEShape(8, 8, 256, 128, 9), "top_k is 9"),
        (MoEShape(5000, 8, 256, 128, 2), "5000 experts"),
    ],
)
def test_shapes_that_are_refused(shape, word):
    answer = support.supports_shape(shape)
    assert not answer and word in answer.reason


@pytest.mark.parametrize("intermediate", [64, 80, 192, 320, 704, 1408, 1536, 2048, 4096])
def test_intermediate_sizes_that_run(intermediate):
    assert support.supports_shape(MoEShape(256, 256, 7168, intermediate, 8))


def test_routing_and_activation():
    assert support.supports_routing(RouterSpec(8, "sigmoid", 8, 4), 256)
    assert "num_groups" in support.supports_routing(RouterSpec(8, "sigmoid", 8, 4), 100).reason
    assert support.supports_activation("silu")
    assert "gelu" in support.supports_activation("gelu").reason


def test_the_first_refusal_is_the_answer():
    no = support.Support(False, "first")
    assert support.first_refusal(support.YES, no, support.Support(False, "second")) is no
    assert support.first_refusal(support.YES, support.YES)
