#!/usr/bin/env bash
# Time to first token under load: stock vLLM and the plugin in turns, on this machine.
#
#   MODEL=Qwen/Qwen3-30B-A3B-FP8 serve_examples/ttft_load.sh [any moe-backend loadtest argument…]
#
# MODEL    name or folder of a block-scaled FP8 MoE checkpoint (required)
# RATES    requests per second, separated by blanks (default "1 4 16 inf")
# INPUT    tokens of each prompt (default 2048)     OUTPUT   of each answer (default 128)
# PROMPTS  requests of each run (default 128)       ROUNDS   turns of each side (default 3)
# TP       number of GPUs (default 1)               OUT      folder of the report (default loadtest)
# DRY_RUN  1 prints the command and stops
set -euo pipefail
# shellcheck source=serve_examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case "${1:-}" in -h | --help) usage && exit ;; esac

[ -n "${MODEL:-}" ] || die "MODEL is not set; see --help"
INPUT="${INPUT:-2048}" OUTPUT="${OUTPUT:-128}" PROMPTS="${PROMPTS:-128}" ROUNDS="${ROUNDS:-3}"
TP="${TP:-1}" OUT="${OUT:-loadtest}"
for name in INPUT OUTPUT PROMPTS ROUNDS TP; do want_number "$name" 1; done
want_command moe-backend "pip install 'moe-backend[cuda,report]'"

rates=()
for rate in ${RATES:-1 4 16 inf}; do rates+=(--rate "$rate"); done
run moe-backend loadtest --model "$MODEL" --compare default "${rates[@]}" \
    --input-len "$INPUT" --output-len "$OUTPUT" --num-prompts "$PROMPTS" --rounds "$ROUNDS" \
    --server-arg=--tensor-parallel-size="$TP" --out "$OUT" "$@"
