# SPDX-License-Identifier: Apache-2.0
"""The single statement of what is legal.

Every check of the project (plugin at load, tuner, heuristics, ``doctor``) asks here. A reason says
what was found and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from moe_backend.types import BLOCK, GemmConfig, KernelConfig, MoEShape, RouterSpec

MAX_EXPERTS = 4096
MAX_TOP_K = 64
ACTIVATIONS = ("silu",)  # gated: silu(gate) * up, optionally clamped


class Support(NamedTuple):
    """An answer and, when it is no, the reason with a remedy."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Support(True)


def first_refusal(*answers: Support) -> Support:
    """The first answer that is no, else yes."""
    return next((a for a in answers if not a.ok), YES)


def supports_device(capability: tuple[int, int] | None) -> Support:
    """``capability`` is the CUDA compute capability, None where there is no CUDA device.

    Without CUDA the torch reference runs, so that tests and a laptop run the real server.
    """
    if capability is None or capability == (9, 0):
        return YES
    name = "sm_{}{}".format(*capability)
    return Support(
        False,
        f"the GPU is {name}, the kernels are built for sm_90 (H100, H200). "
        "Run on a Hopper GPU or start without --quantization tma_fp8",
    )


def supports_platform(name: str) -> Support:
    """``name`` is the engine's platform: "cuda", "cpu", "rocm", "tpu", "xpu" ..."""
    if name in ("cuda", "cpu"):
        return YES
    return Support(
        False,
        f"the platform is {name!r}; the kernels need CUDA, the reference a CPU. "
        "Start without --quantization tma_fp8",
    )


def supports_checkpoint(quantization: Mapping[str, Any] | None) -> Support:
    """``quantization`` is the ``quantization_config`` of a checkpoint's config.json."""
    remedy = (
        "Use a checkpoint with FP8 weights in 128x128 blocks (DeepSeek-R1, Qwen3-*-FP8) "
        "or start without --quantization tma_fp8"
    )
    if not quantization:
        return Support(False, f"the checkpoint has no quantization_config. {remedy}")
    method = quantization.get("quant_method")
    if method != "fp8":
        return Support(False, f"the checkpoint's quant_method is {method!r}, not 'fp8'. {remedy}")
    block = quantization.get("weight_block_size")
    if block is None:
        return Support(
            False,
            f"the checkpoint has per-tensor FP8 scales (no weight_block_size). {remedy}",
        )
    if list(block) != [BLOCK, BLOCK]:
        return Support(
            False, f"weight_block_size is {list(block)}, not [{BLOCK}, {BLOCK}]. {remedy}"
        )
    scheme = quantization.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        return Support(False, f"activation_scheme is {scheme!r}, not 'dynamic'. {remedy}")
    return YES


def supports_tensor_parallel(hidden: int, intermediate: int, tp_size: int) -> Support:
    """``intermediate`` is the size of one expert before tensor parallelism cuts it."""
    if tp_size == 1:
        return YES
    shard = intermediate / tp_size
    if shard % BLOCK == 0:
        return YES
    legal = [n for n in range(1, tp_size) if intermediate % (n * BLOCK) == 0]
    remedy = f"Use a tensor-parallel size of {legal[-1]}" if legal else "Use no tensor parallelism"
    return Support(
        False,
        f"tensor parallel size {tp_size} cuts the experts' intermediate size {intermediate} into "
        f"{shard:g} rows, which splits a {BLOCK}x{BLOCK} scale block. {remedy}, or "
        "--enable-expert-parallel, which keeps experts whole",
    )


def supports_shape(shape: MoEShape) -> Support:
    """The sizes of a layer on one rank."""
    if shape.hidden % BLOCK:
        return Support(
            False,
            f"hidden size {shape.hidden} is not a multiple of {BLOCK}: activation groups would "
            "straddle the row's end. Use the engine's default backend for this model",
        )
    if shape.intermediate < 1 or shape.intermediate % 16:
        return Support(
            False,
            f"intermediate size {shape.intermediate} is not a multiple of 16: TMA rows must be "
            "16-byte aligned. Use a smaller tensor-parallel size",
        )
    if not 1 <= shape.num_experts <= MAX_EXPERTS:
        return Support(False, f"{shape.num_experts} experts; the router handles 1 to {MAX_EXPERTS}")
    if not 1 <= shape.top_k <= min(MAX_TOP_K, shape.num_experts):
        most = min(MAX_TOP_K, shape.num_experts)
        return Support(False, f"top_k is {shape.top_k}; the router handles 1 to {most} here")
    return YES


def supports_routing(spec: RouterSpec, num_experts: int) -> Support:
    try:
        spec.check(num_experts)
    except ValueError as error:
        return Support(False, str(error))
    return YES


def supports_activation(name: str) -> Support:
    if name in ACTIVATIONS:
        return YES
    return Support(
        False,
        f"activation {name!r}; the fused epilogue knows {', '.join(ACTIVATIONS)}. "
        "Start without --quantization tma_fp8",
    )


def supports_expert_layout(intermediate: int) -> Support:
    """Checkpoints scale gate and up in blocks of their own: both must begin on a block's edge."""
    if intermediate % BLOCK == 0:
        return YES
    return Support(
        False,
        f"the experts' intermediate size {intermediate} is not a multiple of {BLOCK}, so the scale "
        "blocks of gate and up overlap. Start without --quantization tma_fp8",
    )


def supports_experts(
    *, has_bias: bool = False, lora: bool = False, weight_on_input: bool = False
) -> Support:
    """What an expert may have beside its two matrices."""
    if has_bias:
        return Support(
            False,
            "the experts have biases, which the kernels do not add. "
            "Start without --quantization tma_fp8",
        )
    if lora:
        return Support(
            False,
            "LoRA is enabled, and adapters on FP8 experts are not supported. Merge the adapter "
            "into the checkpoint and drop --enable-lora, or start without --quantization tma_fp8",
        )
    if weight_on_input:
        return Support(
            False,
            "the model multiplies router weights into the experts' input; the kernels apply them "
            "to the output. Start without --quantization tma_fp8",
        )
    return YES


def supports_engine_backend(moe_backend: str) -> Support:
    """Any --moe-backend other than auto is a wish for one of the engine's own kernels."""
    if moe_backend == "auto":
        return YES
    return Support(
        False,
        f"--moe-backend {moe_backend} asks for the engine's own kernels and --quantization tma_fp8 "
        "for ours. Drop one of the two",
    )


ENGINE_ALL2ALL = ("allgather_reducescatter", "naive")


def supports_parallelism(
    *, all2all: str | None = None, dbo: bool = False, elastic: bool = False
) -> Support:
    """``all2all`` is the engine's all-to-all backend, None when tokens do not travel."""
    if dbo:
        return Support(
            False, "dual-batch overlap is not supported. Drop --enable-dbo (and --ubatch-size)"
        )
    if elastic:
        return Support(
            False, "elastic expert parallelism is not supported. Drop --enable-elastic-ep"
        )
    if all2all is not None and all2all not in ENGINE_ALL2ALL:
        return Support(
            False,
            f"--all2all-backend {all2all} hands tokens to the engine's own kernels in a layout of "
            f"its own. Use --all2all-backend {ENGINE_ALL2ALL[0]}",
        )
    return YES


SHARED_MEMORY = 232448  # bytes a CTA may use on sm_90
ALIGNMENTS = (16, 32, 64, 128)


def shared_memory(gemm: GemmConfig, align: int, weight_tiles: int) -> int:
    """Bytes of shared memory that a Triton GEMM's stages take."""
    return gemm.num_stages * gemm.unroll * BLOCK * (weight_tiles * gemm.block_n + align) + 1024


def supports_config(config: KernelConfig, shape: MoEShape) -> Support:
    """Tiles that are wrong or too large for a layer, for the tuner, the files and the heuristic."""
    whole = shape.hidden % BLOCK == 0 and shape.intermediate % BLOCK == 0
    if config.align not in ALIGNMENTS:
        return Support(False, f"align is {config.align}, not one of {ALIGNMENTS}")
    if config.slab % BLOCK:
        return Support(False, f"slab {config.slab} is not a multiple of {BLOCK}")
    if config.gather and config.up.kernel != "gluon":
        return Support(False, "only the gluon kernel gathers rows")
    for name, gemm, weight_tiles in (("up", config.up, 2), ("down", config.down, 1)):
        if gemm.kernel == "gluon":
            if config.align != 128 or not whole:
                return Support(
                    False,
                    f"{name}: the gluon kernel needs tiles of 128 rows and sizes in multiples of "
                    f"{BLOCK}, found align {config.align}, hidden {shape.hidden}, intermediate "
                    f"{shape.intermediate}",
                )
        elif name == "up" and gemm.block_n != BLOCK:
            return Support(False, f"up: block_n is {gemm.block_n}, one quantisation group is 128")
        elif (used := shared_memory(gemm, config.align, weight_tiles)) > SHARED_MEMORY:
            return Support(
                False, f"{name}: {used} bytes of shared memory exceed {SHARED_MEMORY} of a CTA"
            )
    return YES


def supports_transport(
    transport: str, *, platform: str, expert_parallel: bool, graphs: bool, replicated: bool = False
) -> Support:
    """How tokens travel between ranks; asked only when they do.

    ``transport`` is MOE_BACKEND_EP, ``graphs`` whether CUDA graphs are captured, ``replicated``
    whether the ranks of a tensor-parallel group hold the same tokens.
    """
    name = f"MOE_BACKEND_EP={transport}"
    if platform == "cpu":
        if not expert_parallel:
            return Support(
                False,
                "data parallelism that cuts experts needs an all-gather of unequal sizes, which "
                "vLLM does not have on a CPU. Add --enable-expert-parallel",
            )
        if transport != "auto":
            return Support(False, f"{name} needs CUDA. Unset it: on a CPU tokens travel over gloo")
    own = transport in ("symm", "nccl")
    if own and not expert_parallel:
        return Support(False, f"{name} needs whole experts. Add --enable-expert-parallel")
    if replicated and (own or platform == "cpu"):
        return Support(
            False,
            "the ranks of a tensor-parallel group hold the same tokens in this model, which our "
            "exchange would send several times. Use --tensor-parallel-size 1 with data parallelism"
            + ("" if platform == "cpu" else " or MOE_BACKEND_EP=engine"),
        )
    if transport == "nccl" and graphs:
        return Support(
            False,
            f"{name} reads counts on the host, which CUDA graphs cannot capture. "
            "Add --enforce-eager or use MOE_BACKEND_EP=symm",
        )
    return YES


def supports_expert_division(num_experts: int, ep_size: int) -> Support:
    """Our exchange gives every rank the same number of experts."""
    if num_experts % ep_size == 0:
        return YES
    return Support(
        False,
        f"{num_experts} experts cannot be shared equally by {ep_size} ranks. Use a number of ranks "
        "that divides them, redundant experts that fill up, or MOE_BACKEND_EP=engine",
    )
