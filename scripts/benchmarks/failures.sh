#!/usr/bin/env bash
# One rank raises, is killed or is stopped in each phase of a run; writes docs/results/failures.md.
source "$(dirname "$0")/../setup.sh"
exec .venv/bin/python -m scripts.benchmarks.failures "${RUNS:-runs/failures}" docs/results/failures.md
