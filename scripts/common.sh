# Sourced by the installation scripts.
#
#   step NAME COMMAND…          run a command quietly and print one line: its name and how long it took. If it fails,
#                               print the end of its output and return its status. `step -q`: no line for a command
#                               that had nothing to do (under 2 s).
#   python_install PYTHON ARGUMENT…   install packages into that Python's environment: with uv, which takes a tenth of
#                               the time, or with pip if uv is not available.
#
#   find_python                 print the Python to make environments with.
#   is_made_with PYTHON FOLDER  whether the environment FOLDER was made with this version and build of Python.
#
# Set `program` to the prefix of each line, and `uv` to a path (see `find_uv`).

say() { echo "$program: $*" >&2; }

step() {
  local least_s=0
  [ "$1" != -q ] || { least_s=2 && shift; }
  local name=$1 started=$SECONDS output status=0
  shift
  output=$(mktemp)
  "$@" >"$output" 2>&1 || status=$?
  if [ "$status" = 0 ]; then
    [ $((SECONDS - started)) -lt "$least_s" ] ||
      say "$(printf '%-58s %3d s' "$name" $((SECONDS - started)))"
  else
    say "$name failed after $((SECONDS - started)) s (status $status):"
    grep -v '^WARNING: Location ' "$output" | tail -n 15 >&2
  fi
  rm -f "$output"
  return "$status"
}

# The system's Python is preferred: those of version managers are usually compiled without optimizations, and then the
# tests take a fifth longer. PYTHON=… selects another. It may lack `ensurepip`, without which it makes no environments.
find_python() {
  local system=/usr/bin/python3
  if [ -n "${PYTHON:-}" ]; then
    echo "$PYTHON"
  elif "$system" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "$system"
  else
    echo python3
  fi
}

is_made_with() { [ "$("$1" -VV)" = "$("$2/bin/python" -VV 2>/dev/null)" ]; }

find_uv() { # prints the path of uv, or nothing
  command -v uv 2>/dev/null || { [ -x .venv/bin/uv ] && echo "$PWD/.venv/bin/uv"; } || true
}

# uv does not read pip's configuration (a mirror, a folder of wheels, a certificate), so it is passed on. pip's extra
# indexes are left out: uv would prefer them, and the hashes of the lock files are PyPI's.
use_pip_configuration() { # PYTHON
  local name value
  while IFS='=' read -r name value; do
    value=${value#\'}
    value=${value%\'}
    case ${name##*.} in
    index-url) export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$value}" ;;
    find-links) export UV_FIND_LINKS="${UV_FIND_LINKS:-$(echo $value | tr ' ' ',')}" ;;
    cert) export SSL_CERT_FILE="${SSL_CERT_FILE:-$value}" ;;
    esac
  done < <("$1" -m pip config list 2>/dev/null || true)
}

python_install() {
  local python=$1
  shift
  if [ -n "${uv:-}" ]; then
    "$uv" pip install --python "$python" "$@" && return 0
    echo "uv failed; trying pip"
  fi
  local arguments=() argument
  for argument in "$@"; do # without options that pip does not have; it always compiles
    case $argument in --compile-bytecode | --torch-backend=*) ;; *) arguments+=("$argument") ;; esac
  done
  "$python" -m pip install --disable-pip-version-check "${arguments[@]}"
}

# Install a CPU build of torch: from the folder of wheels in pip's configuration, else from PyTorch's index for CPUs,
# which uv has built in, else from the package index.
install_torch() { # PYTHON torch==VERSION
  if [ -z "${UV_FIND_LINKS:-}" ] && [ -n "${uv:-}" ]; then
    "$uv" pip install --python "$1" --torch-backend=cpu "$2" && return 0
  fi
  python_install "$1" "$2"
}
