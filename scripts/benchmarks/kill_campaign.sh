#!/usr/bin/env bash
# kill -9 of the launcher or of a rank, at random moments, saving included; each time `--resume auto` goes on.
# Writes docs/results/kill-campaign.md. KILLS (10) per backend; SEED (1); RUNS says where the runs are kept.
source "$(dirname "$0")/../setup.sh"
runs=${RUNS:-runs/kill-campaign}
rm -rf "$runs"
exec .venv/bin/python scripts/benchmarks/kill_campaign.py "$runs" docs/results/kill-campaign.md "${KILLS:-10}" "${SEED:-1}"
