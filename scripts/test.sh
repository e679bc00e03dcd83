#!/usr/bin/env bash
# Every check and test.
#   scripts/test.sh         all
#   scripts/test.sh fast    without the tests that start processes or take long
#   scripts/test.sh PATH... these tests only
source "$(dirname "$0")/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1

tier="not gpu"
if [ "${1:-}" = fast ]; then tier="not gpu and not slow"; shift; fi
case ${1:-} in "" | -*) all=yes ;; *) all=no ;; esac # pytest's own flags may follow; a path means these tests only
if [ $all = yes ]; then
  .venv/bin/ruff format --check --quiet . || { echo "error: run .venv/bin/ruff format ." >&2; exit 1; }
  .venv/bin/ruff check --quiet .
  .venv/bin/mypy
  .venv/bin/codespell src docs scripts recipes ./*.md
  # two test files at a time; a file's tests stay together, since they share models and runs
  set -- --numprocesses "${RLCTL_TEST_WORKERS:-2}" --dist loadfile "$@"
fi
exec .venv/bin/python -m pytest -m "$tier" "$@"
