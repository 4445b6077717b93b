# Read by the bash of a page. Commands that run until they are stopped start in the background, and the next command
# starts when they listen. PAGE_STATE has a file for each, with its command, named by its pid.
set -eEo pipefail
trap 'echo "failed: line $LINENO: $BASH_COMMAND" >&2' ERR

rollyard() {
  case ${1-} in
  serve | engine | gym-agent) in_background rollyard "$@" ;;
  top) command rollyard "$@" --once ;;
  *) command rollyard "$@" ;;
  esac
}

python() {
  case $* in
  "-m rollyard.testing.scripted_engine"* | "-m rollyard.testing.gym_server --port"*) in_background python "$@" ;;
  *) command python "$@" ;;
  esac
}

in_background() {
  [ "$1" = python ] || stop_earlier "$1 $2"
  local log
  log=$(mktemp "$PAGE_STATE/log.XXXX")
  command "$@" >"$log" 2>&1 </dev/null &
  local pid=$!
  echo "$*" >"$PAGE_STATE/$pid"
  until ss --no-header --listening --tcp --processes | grep -q "pid=$pid,"; do
    if ! kill -0 "$pid" 2>/dev/null; then
      cat "$log" >&2
      echo "ended before it was ready: $*" >&2
      return 1
    fi
    sleep 0.1 # `ss` reads every process: more often, it would take the CPU of the program that starts
  done
  cat "$log"
}

stop_earlier() { # COMMAND, if an earlier block has started it
  local earlier
  for earlier in $(cd "$PAGE_STATE" && grep -ls "^$1" [0-9]* || true); do
    kill "$earlier"
    tail --pid="$earlier" -f /dev/null
    rm "$PAGE_STATE/$earlier"
  done
}
