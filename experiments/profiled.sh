# Sourced by experiments that start the controller from a profile and hold it against each fixed K and vLLM's table filled
# in from the same profile. They run in the checkout; `here` is the folder of their results.
bin=.venv/bin

profile() { # NAME CONFIG OPTION...
  local name=$1 config=$2
  shift 2
  [ -e "$here/$name.json" ] || $bin/rollout-spec profile --config "$config" --out "$here/$name.json" "$@"
}

bench() { # NAME PROFILE CONFIG ARMS OPTION...
  local name=$1 profile=$here/$2.json config=$3 arms=$4 table
  shift 4
  table=$($bin/python -c 'import json, sys
print(json.load(open(sys.argv[1]))["exports"]["num_speculative_tokens_per_batch_size"])' "$profile")
  $bin/rollout-spec bench --config "$config" --out "$here/$name" --arms "$arms" \
    --set policy.profile="$profile" --set bench.table="$table" --set bench.warmup_tokens=24 "$@"
}
