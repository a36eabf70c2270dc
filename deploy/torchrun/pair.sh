#!/bin/bash
# Two jobs of torchrun on this machine, independent of each other: three processes train, two receive. On several hosts run
# each torchrun where it belongs, and set ETHA_REDIS_URL and ETHA_LISTEN (docs/hosts.md).
# torchrun sets RANK and WORLD_SIZE, from which Etha knows each worker's rank. Each job has a run id of its own
# (--rdzv-id): it tells a new launch of a side from a worker of the old one that comes again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
id=$(date +%s)
torchrun --nnodes=1 --nproc-per-node=3 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id="trainer-$id" "$here/side.py" trainer &
trainer=$!
trap 'kill "$trainer" 2>/dev/null || true' EXIT
torchrun --nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id="inference-$id" "$here/side.py" inference
wait "$trainer"
