#!/usr/bin/env bash
# Serves a model over several machines through Ray, vLLM's own multi-node executor.
#
#   on the first machine:   serve_examples/serve_ray.sh head
#   on every other one:     HEAD=10.0.0.1 serve_examples/serve_ray.sh worker
#   then on the first:      MODEL=… NODES=2 serve_examples/serve_ray.sh serve [any vLLM argument…]
#
# The same versions of vLLM and moe-backend must be installed on all of them.
#
# HEAD       address of the first machine (worker)
# MODEL      name or folder of a block-scaled FP8 MoE checkpoint, readable on all machines (serve)
# NODES      number of machines (serve, default 2): pipeline stages, one a machine
# TP         GPUs of each machine (serve, default 8)
# RAY_PORT   (default 6379)     PORT   of the server (default 8000)
# DRY_RUN    1 prints the command and stops
set -euo pipefail
# shellcheck source=serve_examples/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
role="${1:-}"
case "$role" in
-h | --help) usage && exit ;;
head | worker | serve) shift ;;
*) die "expected head, worker or serve${role:+, found $role}; see --help" ;;
esac

NODES="${NODES:-2}" TP="${TP:-8}" RAY_PORT="${RAY_PORT:-6379}" PORT="${PORT:-8000}"
want_number NODES 1
want_number TP 1
want_number RAY_PORT 1
want_number PORT 1
want_command ray "pip install 'ray[default]'"

case "$role" in
head)
    run ray start --head --port "$RAY_PORT" --block
    ;;
worker)
    [ -n "${HEAD:-}" ] || die "HEAD is not set: the first machine's address"
    run ray start --address "$HEAD:$RAY_PORT" --block
    ;;
serve)
    [ -n "${MODEL:-}" ] || die "MODEL is not set; see --help"
    want_command moe-backend "pip install 'moe-backend[cuda]'"
    # The placement is Ray's; MOE_BACKEND_* variables of this shell reach the workers on all machines.
    run moe-backend serve "$MODEL" --distributed-executor-backend ray \
        --tensor-parallel-size "$TP" --pipeline-parallel-size "$NODES" --port "$PORT" "$@"
    ;;
esac
