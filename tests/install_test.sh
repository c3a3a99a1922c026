#!/usr/bin/env bash
# install_test.sh SOURCE BUILD: installs tapetune, takes the example out of README.md, builds it against the installed
# package as a project of its own and runs it.
set -euo pipefail
source=$1 build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/installed" >/dev/null
"$work/installed/bin/tapetune" --version

# The README's C++ block and CMake block, as they stand there.
mkdir "$work/app"
awk '/^```cpp$/ {on = 1; next} /^```$/ {on = 0} on' "$source/README.md" >"$work/app/main.cpp"
awk '/^```cmake$/ {on = 1; next} /^```$/ {on = 0} on' "$source/README.md" >"$work/app/CMakeLists.txt"
[ -s "$work/app/main.cpp" ] && [ -s "$work/app/CMakeLists.txt" ] || { echo "README.md has no example"; exit 1; }
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
