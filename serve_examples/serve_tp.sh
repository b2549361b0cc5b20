#!/usr/bin/env bash
# Serves a model on the GPUs of one machine with tensor parallelism.
#
#   MODEL=deepseek-ai/DeepSeek-R1 TP=8 serve_examples/serve_tp.sh [any vLLM argument…]
#
# MODEL    name or folder of a block-scaled FP8 MoE checkpoint (required)
# TP       number of GPUs, each holds a slice of every expert (default 8). A slice must keep whole
#          blocks of 128; a TP that cuts one is refused at the start with the sizes that fit.
# PORT     (default 8000)
# DRY_RUN  1 prints the command and stops
set -euo pipefail
# shellcheck source=serve_examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case "${1:-}" in -h | --help) usage && exit ;; esac

[ -n "${MODEL:-}" ] || die "MODEL is not set; see --help"
TP="${TP:-8}" PORT="${PORT:-8000}"
want_number TP 1
want_number PORT 1
want_command moe-backend "pip install 'moe-backend[cuda]'"
want_gpus "$TP"

run moe-backend serve "$MODEL" --tensor-parallel-size "$TP" --port "$PORT" "$@"
