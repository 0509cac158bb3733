# Sourced by the scripts that run servers. Sets scratch (a private folder) and stops every server on exit.
scratch=$(mktemp -d)
pids=()

# finish stops what start started and removes the scratch folder; the exit status stays as it was.
finish() {
  local rc=$?
  trap - EXIT INT TERM
  for pid in ${pids[@]+"${pids[@]}"}; do
    kill "$pid" 2>/dev/null || continue
    wait "$pid" 2>/dev/null || :
  done
  chmod -R u+w "$scratch" 2>/dev/null || :
  rm -rf "$scratch"
  exit "$rc"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# free_port prints a loopback port on which nothing listens. It is below 32768, from where on the kernel hands out ports
# to connections: on those nothing may listen, and nobody sees it by connecting.
free_port() {
  local port
  while port=$((20000 + RANDOM % 12000)); (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
  echo "$port"
}

# fetch prints the body of http://127.0.0.1:PORT/PATH; it fails unless the answer is 200.
fetch() {
  local url=${1#http://} port path answer
  port=${url#*:} path=/${url#*/}
  port=${port%%/*}
  answer=$({ exec 3<>"/dev/tcp/127.0.0.1/$port" &&
    printf 'GET %s HTTP/1.0\r\nHost: 127.0.0.1:%s\r\n\r\n' "$path" "$port" >&3 &&
    cat <&3; } 2>/dev/null) || return 1
  sed '1,/^\r\{0,1\}$/d' <<<"$answer"
  [[ $answer == HTTP/1.[01]" 200 "* ]]
}

# start LOG PORT PATH COMMAND... runs a server in the background and returns when it answers 200 on PATH.
start() {
  local log=$1 url=http://127.0.0.1:$2$3 tries=0
  shift 3
  "$@" >"$log" 2>&1 &
  pids+=($!)
  until fetch "$url" >/dev/null; do
    if ! kill -0 "${pids[-1]}" 2>/dev/null || ((++tries > 600)); then
      echo "error: $1 $2 did not answer on $url; it said:" >&2
      cat "$log" >&2
      exit 1
    fi
    sleep 0.1
  done
}

# start_s3 BUCKET runs an S3 server with one empty bucket. It sets s3 to its HOST:PORT and exports its credentials.
start_s3() {
  local port
  port=$(free_port)
  s3=127.0.0.1:$port
  export AWS_ACCESS_KEY_ID=demo AWS_SECRET_ACCESS_KEY AWS_REGION=us-east-1
  AWS_SECRET_ACCESS_KEY=$(head -c 20 /dev/urandom | od -An -vtx1 | tr -d ' \n')
  mkdir -p "$scratch/s3/$1"
  ROOT_ACCESS_KEY=$AWS_ACCESS_KEY_ID ROOT_SECRET_KEY=$AWS_SECRET_ACCESS_KEY \
    start s3.log "$port" /health versitygw --port "$s3" --keep-alive --health /health posix "$scratch/s3"
}

# run prints a command as it would be typed, and runs it.
run() {
  printf '\n$ %s\n' "$*" >&2
  "$@"
}

# no is run for a command whose answer must be no: exit code 1.
no() {
  local rc=0
  run "$@" || rc=$?
  [ "$rc" = 1 ] || { echo "error: want the answer no, exit code 1, got $rc" >&2; return 1; }
}
