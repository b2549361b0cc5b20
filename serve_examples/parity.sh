#!/usr/bin/env bash
# The same prompts through the default backend and ours, with numeric bounds; exit code 1 when one
# is broken.
#
#   MODEL=Qwen/Qwen3-30B-A3B-FP8 serve_examples/parity.sh [any moe-backend parity argument…]
#
# MODEL    name or folder of a block-scaled FP8 MoE checkpoint (required)
# TP       number of GPUs (default 1)
# OUT      folder of the result, plot and logs (default parity)
# DRY_RUN  1 prints the command and stops
set -euo pipefail
# shellcheck source=serve_examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case "${1:-}" in -h | --help) usage && exit ;; esac

[ -n "${MODEL:-}" ] || die "MODEL is not set; see --help"
TP="${TP:-1}" OUT="${OUT:-parity}"
want_number TP 1
want_command moe-backend "pip install 'moe-backend[cuda]'"

run moe-backend parity --model "$MODEL" --tp "$TP" --output "$OUT" "$@"
