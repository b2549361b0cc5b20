#!/usr/bin/env bash
# Serves a model on the GPUs of one machine with expert parallelism: attention is replicated (data
# parallel), every GPU holds whole experts, tokens travel between GPUs by all-to-all.
#
#   MODEL=deepseek-ai/DeepSeek-R1 DP=8 serve_examples/serve_ep.sh [any vLLM argument…]
#
# MODEL           name or folder of a block-scaled FP8 MoE checkpoint (required)
# DP              data-parallel ranks (default 8)
# TP              tensor-parallel size inside a rank (default 1); DP times TP GPUs are needed
# MOE_BACKEND_EP  all-to-all: auto, symm (NVLink symmetric memory), nccl or engine (default auto)
# PORT            (default 8000)
# DRY_RUN         1 prints the command and stops
set -euo pipefail
# shellcheck source=serve_examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case "${1:-}" in -h | --help) usage && exit ;; esac

[ -n "${MODEL:-}" ] || die "MODEL is not set; see --help"
DP="${DP:-8}" TP="${TP:-1}" PORT="${PORT:-8000}"
want_number DP 2
want_number TP 1
want_number PORT 1
export MOE_BACKEND_EP="${MOE_BACKEND_EP:-auto}"
case "$MOE_BACKEND_EP" in
auto | symm | nccl | engine) ;;
*) die "MOE_BACKEND_EP=$MOE_BACKEND_EP: expected auto, symm, nccl or engine" ;;
esac
want_command moe-backend "pip install 'moe-backend[cuda]'"
want_gpus "$((DP * TP))"

run moe-backend serve "$MODEL" --data-parallel-size "$DP" --tensor-parallel-size "$TP" \
    --enable-expert-parallel --port "$PORT" "$@"
