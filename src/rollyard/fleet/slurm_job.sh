# ---- From here on, every job is the same. The script runs as `job.sh` on the first node, and by srun, from the shared
# ---- folder, as `job.sh node ADDRESS` (Ray on a further node) and `job.sh engine` (an engine).
set -u
umask 077

# Ports are derived from the job's number: above Ray's workers, below Linux's ephemeral ports. Two jobs on one node get
# the same ports only if their numbers are a multiple of 1,000 apart.
BASE=$((20000 + SLURM_JOB_ID % 1000 * 10))
RAY_PORT=$BASE SERVICE_PORT=${PORT:-$((BASE + 1))} ENGINE_PORT=$((BASE + 2)) RAY_CLIENT_PORT=$((BASE + 3))
SCRATCH=$SCRATCH-$SLURM_JOB_ID
RAY=$(dirname "$PYTHON")/ray
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$FOLDER/ray-token RAY_USAGE_STATS_ENABLED=0
export RAY_memory_monitor_refresh_ms=0 # otherwise Ray ends a node, with all its rollouts, when memory is short
export RAY_prestart_worker_first_driver=0 # otherwise one idle Python process per CPU, on every node
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # the service drains; Ray's own drain would wait for nodes that stay

say() { printf '%(%F %T)T %s\n' -1 "$*"; }

# NODE: its address, as Slurm reaches it. Some machines resolve their own name to 127.0.1.1, which others cannot use.
address() {
  local named found
  named=$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  found=$(getent ahostsv4 "${named:-$1}" | awk 'NR == 1 { print $1 }')
  case $1:$found in
  "$SLURMD_NODENAME": | "$SLURMD_NODENAME":127.*) hostname -I | awk '{ print $1 }' ;;
  *) echo "$found" ;;
  esac
}

# Its name can be guessed, and /tmp is shared: another user who created it first would own what is in it.
make_scratch() {
  mkdir -p "$SCRATCH" && [ -O "$SCRATCH" ] && [ ! -L "$SCRATCH" ] && return
  say "$SCRATCH on $SLURMD_NODENAME is a link or belongs to another user" && exit 1
}

# COMMAND...: replaces this shell, without the job's variables: a leaked one can end the job.
bare() {
  unset "${!SLURM@}" "${!SBATCH@}" "${!SRUN@}" "${!PMI@}"
  exec "$@"
}

# ARGUMENTS...: Ray on this node, in the foreground. Never `ray stop`: it would end other jobs' Ray, too. No rollout
# goes through Ray, so its object store is as small as Ray allows.
ray_here() {
  local memory_mib=${SLURM_MEM_PER_NODE:-$((${SLURM_MEM_PER_CPU:-0} * SLURM_CPUS_ON_NODE))}
  local sizes=(--num-cpus="$SLURM_CPUS_ON_NODE" --object-store-memory=80000000)
  [ "$memory_mib" -gt 0 ] && sizes+=(--memory="$((memory_mib << 20))")
  export ROLLYARD_DATA_DIR=$SCRATCH/node-$SLURMD_NODENAME
  mkdir -p "$ROLLYARD_DATA_DIR"
  bare "$RAY" start "$@" --block --disable-usage-stats --log-color=false --include-log-monitor=false "${sizes[@]}"
}

as_node() { # ADDRESS of the first node's Ray
  local ray="" is_over=0
  make_scratch
  trap 'is_over=1; kill -TERM "$ray" 2>/dev/null' TERM
  while [ "$is_over" = 0 ]; do # if Ray ends by itself, start it again: the service loses the node and gets it back
    (ray_here --address="$1" --node-ip-address="$(address "$SLURMD_NODENAME")") &
    ray=$!
    until wait "$ray" || ! kill -0 "$ray" 2>/dev/null; do :; done
    [ "$is_over" = 1 ] || { say "Ray ended on $SLURMD_NODENAME; it is started again" && sleep 5; }
  done
  rm -rf "$SCRATCH"
}

# The other nodes finish their rollouts before the service ends, as far as there is time: they end with this job.
drain_nodes() {
  [ "$USES_RAY" = 1 ] && [ -s "$FOLDER/url" ] || return 0
  ROLLYARD_URL=$(<"$FOLDER/url") ROLLYARD_TOKEN=$(<"$FOLDER/token") timeout "$((${ROLLYARD_DRAIN_S%.*} + 10))" \
    "$PYTHON" -m rollyard nodes drain --all --timeout-s "$ROLLYARD_DRAIN_S" >/dev/null || say "not all nodes were drained"
}

# The service drains at INT. Before it answers requests it still ignores INT (set by bash) and has nothing to drain.
drain_service() {
  [ -s "$SERVICE/url" ] && kill -INT "$service" || kill -TERM "$service"
}

as_engine() {
  ENGINE_HOST=$(address "$SLURMD_NODENAME")
  export ENGINE_HOST ENGINE_PORT
  engine
}

# NODES LOG ARGUMENTS...: `job.sh ARGUMENTS` once on each of these nodes, beside whatever else runs there.
on_nodes() {
  local names=$1 log=$2 count
  shift 2
  count=$(wc -w <<<"$names")
  srun --overlap --cpu-bind=none --no-kill --kill-on-bad-exit=0 --wait=0 --nodelist="${names// /,}" --nodes="$count" \
    --ntasks="$count" --ntasks-per-node=1 --output="$FOLDER/$log" --open-mode=append bash "$FOLDER/job.sh" "$@" &
}

as_first() {
  local host name url ray="" beside service status told="" watch names=() options=() client=()
  trap 'say "ended before it started"; rm -rf "$SCRATCH"; exit 0' USR1
  make_scratch
  host=$(address "$SLURMD_NODENAME")
  read -r -d '' -a names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  say "job $SLURM_JOB_ID on ${names[*]}, started ${SLURM_RESTART_COUNT:-0} times before"
  rm -f "$FOLDER/url" "$SERVICE/url"
  mkdir -p "$SERVICE"

  if [ "$ENGINE_NODES" -gt 0 ]; then
    on_nodes "${names[*]:0:ENGINE_NODES}" "engine-%n.log" engine
    for name in "${names[@]:0:ENGINE_NODES}"; do ENGINES+=("http://$(address "$name"):$ENGINE_PORT"); done
  fi
  for url in "${ENGINES[@]}"; do options+=(--engine "$url"); done

  if [ "$USES_RAY" = 1 ]; then
    # If Ray's client server is installed, Ray starts it, by default at port 10001. The dashboard and the monitor that
    # scales clusters are not used.
    "$PYTHON" -c 'import grpc' 2>/dev/null && client=(--ray-client-server-port="$RAY_CLIENT_PORT")
    (ray_here --head --node-ip-address="$host" --port="$RAY_PORT" "${client[@]}" --include-dashboard=false \
      --no-monitor --temp-dir="$SCRATCH") &
    ray=$!
    until (exec 3<>"/dev/tcp/$host/$RAY_PORT") 2>/dev/null; do
      kill -0 "$ray" 2>/dev/null || { say "Ray did not start" && rm -rf "$SCRATCH" && return 1; }
      sleep 0.5
    done
    [ "${#names[@]}" -gt 1 ] && on_nodes "${names[*]:1}" "node-%n.log" node "$host:$RAY_PORT"
    options+=(--fleet ray --address "$host:$RAY_PORT")
    # Nodes are sent keys and prompts: over TLS, with a certificate whose digest is in the URL, unless set otherwise.
    export ROLLYARD_TLS="${ROLLYARD_TLS:-own}"
  fi

  # Clients need the token. They may use the service's address and this machine's own names.
  export ROLLYARD_ADMIN_TOKENS=@$FOLDER/token ROLLYARD_ON_TERM=stop
  export ROLLYARD_HOSTS="${ROLLYARD_HOSTS:-},$(hostname),$(hostname -f 2>/dev/null),$SLURMD_NODENAME"
  [ -e "$FOLDER/store-url" ] && export ROLLYARD_STORE="$(<"$FOLDER/store-url")"
  (bare "${SERVICE_COMMAND[@]}" --host "$host" --port "$SERVICE_PORT" --data-dir "$SERVICE" "${options[@]}") &
  service=$!
  # The service writes a file when it answers requests; this publishes it in the job's folder.
  (
    until [ -s "$SERVICE/url" ]; do sleep 0.2; done
    cp "$SERVICE/url" "$FOLDER/.url" && mv "$FOLDER/.url" "$FOLDER/url"
  ) &
  watch=$!

  # USR1 goes to this script alone (time is nearly up, or `rollyard slurm down`): the service drains, at INT. At TERM,
  # Slurm has signalled every process of the job, sandboxes and engines, too, and kills them soon. What happens then is
  # not the agent's doing: the service gives everything back at once (ROLLYARD_ON_TERM), for the next start.
  beside=$ray
  trap 'told=USR1 beside=; say "draining"; drain_nodes; drain_service' USR1
  trap 'told=TERM beside=; say "Slurm ends the job"; kill -TERM "$service"' TERM
  while kill -0 "$service" 2>/dev/null; do
    wait -n "$service" $beside
    if [ -n "$beside" ] && ! kill -0 "$beside" 2>/dev/null; then
      told=RAY beside= && say "Ray ended by itself" && kill -TERM "$service"
    fi
  done
  wait "$service"
  status=$?
  kill "$watch" 2>/dev/null
  rm -f "$FOLDER/url"
  [ "$told:$status" = USR1:143 ] && status=0 # the signal came before the service handled it
  say "the service ended with $status"
  if [ -n "$ray" ]; then
    kill -TERM "$ray" 2>/dev/null
    wait "$ray"
  fi
  rm -rf "$SCRATCH"
  [ "$told" = RAY ] && return 1
  if [ "$told" = USR1 ] && [ "$REQUEUES" = 1 ] && [ ! -e "$FOLDER/down" ]; then
    say "the time is up: the job is queued again" # and continues with the same store
    scontrol requeue "$SLURM_JOB_ID" && sleep infinity & wait # until Slurm ends it
  fi
  return "$status"
}

set +u # a site's set-up commands are seldom written for -u
setup
set -u
case ${1:-first} in
first) as_first ;;
node) as_node "$2" ;;
engine) as_engine ;;
esac
