#!/bin/bash
# etha-node.sh: srun bash etha-node.sh PROGRAM ARGUMENTS...
export ETHA_RUNTIME_DIR=/tmp/etha-$SLURM_JOB_ID
export ETHA_LISTEN=${NODE_ADDRESS:-$(hostname -I | cut -d ' ' -f 1)}:0
export ETHA_LAUNCH_ID=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
exec "$@"
