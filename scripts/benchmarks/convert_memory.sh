#!/usr/bin/env bash
# Peak memory and speed of `rlctl convert`, both ways, on a generated model: scripts/benchmarks/convert_memory.sh [GB]
set -euo pipefail
cd "$(dirname "$0")/../.."
exec .venv/bin/python scripts/benchmarks/convert_memory.py "${1:-0.5}"
