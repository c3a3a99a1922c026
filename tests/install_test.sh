#!/usr/bin/env bash
# install_test.sh SOURCE BUILD: installs tapetune, builds the example of docs/library.md and examples/own-method against the
# installed package as projects of their own, and runs them.
set -euo pipefail
source=$1 build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/installed" >/dev/null
"$work/installed/bin/tapetune" --version

# The C++ block and the CMake block, exactly as the page shows them.
page=$source/docs/library.md
mkdir "$work/app"
awk '/^```cpp$/ {on = 1; next} /^```$/ {on = 0} on' "$page" >"$work/app/main.cpp"
awk '/^```cmake$/ {on = 1; next} /^```$/ {on = 0} on' "$page" >"$work/app/CMakeLists.txt"
for file in main.cpp CMakeLists.txt; do
  [ -s "$work/app/$file" ] || { echo "$page has no example"; exit 1; }
done
cmake -S "$work/app" -B "$work/app/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/installed" >/dev/null
cmake --build "$work/app/build"

mkdir "$work/model"
cp "$source/tests/data/tiny-model.safetensors" "$work/model/model.safetensors"
python3 - "$source/tests/data/tiny-configs.json" "$work/model/config.json" <<'PY'
import json, sys
json.dump(json.load(open(sys.argv[1]))["default"], open(sys.argv[2], "w"))
PY
"$work/app/build/app" "$work/model" | tee "$work/output"
grep -q "61" "$work/output" # the vocabulary of the tiny model

# A component from outside, in a program of its own; own_method_test.cpp has the rest of what it must do.
cmake -S "$source/examples/own-method" -B "$work/own" -G Ninja -DCMAKE_PREFIX_PATH="$work/installed" >/dev/null
cmake --build "$work/own"
"$work/own/own-method" adapter "$work/model" --method none adapter.type=ia3 --out "$work/ia3"
"$work/own/own-method" merge "$work/ia3" --model "$work/model" --out "$work/merged"
"$work/installed/bin/tapetune" logits "$work/merged" --tokens 1,2,3 --out "$work/logits"
if "$work/installed/bin/tapetune" logits "$work/model" --adapter "$work/ia3" --tokens 1,2,3 --out "$work/refused" 2>"$work/error"; then
  echo "tapetune itself took an adapter that it does not have"
  exit 1
fi
grep -q 'there is no adapter "ia3"' "$work/error"
