#!/usr/bin/env bash
# From a fresh machine to a model that learns: installs into .venv, then runs the main job on a small real model.
# Arguments go to the job: scripts/quickstart.sh --backend dtensor grpo.max_num_steps=20
source "$(dirname "$0")/setup.sh"
exec .venv/bin/rlctl train grpo --model smollm2-135m --backend megatron "$@"
