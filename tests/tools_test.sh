#!/usr/bin/env bash
# tools_test.sh SOURCE: how the scripts in tools/ judge a machine. Fake system files and programs stand in for other machines.
# shellcheck disable=SC2016 # the fake programs' own variables are not expanded here
set -euo pipefail
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck source=tools/machine.sh
. "$source/tools/machine.sh"

failures=0
expect() { # WHAT EXPECTED FOUND; the expected text is a pattern
  # shellcheck disable=SC2053
  if [[ $3 == $2 ]]; then return; fi
  printf 'FAILED: %s\n  expected: %s\n  found:    %s\n' "$1" "$2" "$3"
  failures=$((failures + 1))
}
program() { # FILE LINE…: an executable script
  mkdir -p "$(dirname "$1")"
  printf '%s\n' '#!/bin/bash' "${@:2}" >"$1"
  chmod +x "$1"
}
rust() { # FOLDER CARGO-VERSION RUSTC-VERSION
  program "$1/cargo" "echo cargo $2"
  program "$1/rustc" "echo rustc $3"
}
release() { # ROOT ID VERSION NAME
  mkdir -p "$1/etc"
  printf 'ID=%s\nVERSION_ID="%s"\nPRETTY_NAME="%s"\n' "$2" "$3" "$4" >"$1/etc/os-release"
}

# --- systems --------------------------------------------------------------------------------------------------------
judge() { # ID VERSION NAME MACHINE: exit code and text
  local status=0 text
  release "$work/system" "$1" "$2" "$3"
  text=$(check_system "$work/system" Linux "$4") || status=$?
  echo "$status $text"
}
expect "Ubuntu 22.04 is refused" '1 Ubuntu 22.04.5 LTS is too old*Debian 12 and 13, x86-64; Ubuntu 24.04*' \
  "$(judge ubuntu 22.04 'Ubuntu 22.04.5 LTS' x86_64)"
expect "Debian 11 is refused" '1 Debian 11 is too old*' "$(judge debian 11 'Debian 11' x86_64)"
for version in 12 13; do
  expect "Debian $version is supported" '0 ' "$(judge debian $version any x86_64)"
done
for version in 24.04 26.04; do
  expect "Ubuntu $version is untried" '2 Ubuntu is untried: *should work' "$(judge ubuntu $version any x86_64)"
done
expect "a Debian without a version is unstable" '0 ' "$(judge debian '' 'Debian sid' x86_64)"
expect "aarch64 is untried" '2 aarch64 is untried*' "$(judge debian 13 'Debian 13' aarch64)"
expect "Fedora is untried" '2 fedora is untried*' "$(judge fedora 42 'Fedora 42' x86_64)"
expect "macOS is refused" 'macOS is not supported*Debian 12*' "$(check_system '' Darwin arm64 || true)"
program "$work/mac/uname" 'if [ "$1" = -s ]; then echo Darwin; else echo arm64; fi'
for tool in setup quickstart; do
  expect "tools/$tool on macOS says so and nothing else" "error: \[$tool\] macOS is not supported*" \
    "$(env -u TAPETUNE_BIN PATH="$work/mac:$PATH" TAPETUNE_CACHE="$work/cache" "$source/tools/$tool" 2>&1 || true)"
done

# --- Rust -----------------------------------------------------------------------------------------------------------
search() { # CARGO_HOME ROOT PATH
  CARGO_HOME=$1 PATH=$3:/usr/bin:/bin bash -c '. "$1"; type() { builtin type "$@" | grep -v "^/usr/bin\|^/bin"; }; find_cargo "$2"' \
    _ "$source/tools/machine.sh" "$2" || echo none
}
rust "$work/old" 1.75.0 1.75.0
rust "$work/new" 1.95.0 1.95.0
rust "$work/half" 1.95.0 1.75.0
rust "$work/home/bin" 1.88.0 1.88.0
for minor in 9 89 91; do rust "$work/numbered/usr/lib/rust-1.$minor/bin" 1.$minor.0 1.$minor.0; done
expect "a new cargo on the PATH is taken" "$work/new/cargo" "$(search "$work/home" "$work/numbered" "$work/new")"
expect "a new cargo behind an old one is taken" "$work/new/cargo" "$(search "$work/none" "$work" "$work/old:$work/new")"
expect "rustup's is found off the PATH" "$work/home/bin/cargo" "$(search "$work/home" "$work/numbered" "$work/old")"
expect "Ubuntu's highest number is taken" "$work/numbered/usr/lib/rust-1.91/bin/cargo" \
  "$(search "$work/none" "$work/numbered" "$work/old")"
expect "a cargo with an old rustc is not" none "$(search "$work/none" "$work" "$work/half")"

offers() { # NAME=VERSION…: what apt_cargo makes of an archive with these packages
  program "$work/apt/apt-cache" 'case $1 in' "pkgnames) printf '%s\n' ${*%%=*} cargo-debstatus ;;" \
    "policy) for offer in $*; do [ \"\${offer%%=*}\" = \"\$2\" ] && echo \"  Candidate: \${offer#*=}\"; done ;;" 'esac'
  PATH=$work/apt:$PATH apt_cargo || echo none
}
expect "Debian 12" none "$(offers cargo=0.66.0+ds1-1 cargo-web=1.85.0+dfsg3-1~deb12u3)"
expect "Debian 12 with security, Debian 13" "cargo-web rustc-web" "$(offers cargo=1.85.0+dfsg3-1 cargo-web=1.96.0+dfsg1-1)"
expect "Ubuntu 24.04" "cargo-1.97 rustc-1.97" \
  "$(offers cargo=1.75.0+dfsg0ubuntu1 cargo-1.80=1.80.1 cargo-1.97=1.97.0+dfsg0ubuntu1 cargo-1.91=1.91.1)"
expect "Ubuntu 26.04" "cargo rustc" "$(offers cargo=1.93.1ubuntu1)"

# --- cores and memory -----------------------------------------------------------------------------------------------
program "$work/many/nproc" 'echo 64'
machine() { # NAME GB GROUPS: a new fake machine with that memory and that /proc/self/cgroup
  mkdir -p "$work/$1/proc/self"
  echo "MemAvailable: $(($2 * 1000000)) kB" >"$work/$1/proc/meminfo"
  printf '%b' "$3" >"$work/$1/proc/self/cgroup"
}
put() { # FILE TEXT
  mkdir -p "$(dirname "$1")"
  echo "$2" >"$1"
}
jobs_on() { PATH=$work/many:$PATH bash -c '. "$1"; choose_jobs "$2"; echo "$jobs"' _ "$source/tools/machine.sh" "$work/$1"; }

machine plain 256 '0::/user.slice\n'
expect "without limits, the cores" 64 "$(jobs_on plain)"
machine small 8 ''
expect "8 GB are room for 5" 5 "$(jobs_on small)"
machine tiny 1 ''
expect "at least one" 1 "$(jobs_on tiny)"

machine v2 256 '0::/pod/container\n'
put "$work/v2/sys/fs/cgroup/pod/container/cpu.max" 'max 100000'
put "$work/v2/sys/fs/cgroup/pod/cpu.max" '350000 100000'
expect "version 2: a quota of 3.5 cores on a group around" 4 "$(jobs_on v2)"
put "$work/v2/sys/fs/cgroup/pod/container/memory.max" 3200000000
expect "version 2: 3.2 GB" 2 "$(jobs_on v2)"

machine v1 256 '5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n' # a container: the groups' names are the host's
put "$work/v1/sys/fs/cgroup/cpu/cpu.cfs_quota_us" 200000
put "$work/v1/sys/fs/cgroup/cpu/cpu.cfs_period_us" 100000
put "$work/v1/sys/fs/cgroup/memory/memory.limit_in_bytes" 9223372036854771712
expect "version 1: a quota of 2 cores, no limit of memory" 2 "$(jobs_on v1)"
put "$work/v1/sys/fs/cgroup/cpu/cpu.cfs_quota_us" -1
put "$work/v1/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes" 4800000000
expect "version 1: no quota, 4.8 GB" 3 "$(jobs_on v1)"

# --- disk -----------------------------------------------------------------------------------------------------------
program "$work/disk/df" 'echo head; case $2 in */folders/a*) echo "dev 1 1 2000000 1% /a" ;; *) echo "dev 1 1 9000000 1% /b" ;; esac'
mkdir -p "$work/folders/a" "$work/folders/b"
short() { PATH=$work/disk:$PATH disk_shortage "$@"; }
expect "enough room" '' "$(short "$work/folders/a" 1500 "$work/folders/b" 8000)"
expect "folders on one disk are added up" '3.0 GB are needed in *a/new, *a, but /a has 2.0 GB free' \
  "$(short "$work/folders/a/new" 1500 "$work/folders/a" 1500 "$work/folders/b" 100)"

# --- LibTorch -------------------------------------------------------------------------------------------------------
mkdir -p "$work/checkout/build" "$work/cache/python/lib/python3.11/site-packages/torch"
cp -r "$source/tools" "$work/checkout"
where() { env -u TAPETUNE_TORCH TAPETUNE_CACHE="$work/cache" "$@" "$work/checkout/tools/setup" --where; }
expect "the wheel" "$work/cache/python/*/torch" "$(where)"
echo /opt/libtorch >"$work/checkout/build/torch"
expect "a LibTorch is remembered in build/" /opt/libtorch "$(where)"
expect "the variable comes first" /opt/other "$(where TAPETUNE_TORCH=/opt/other)"
expect "an empty variable goes back to the wheel" "$work/cache/python/*/torch" "$(where TAPETUNE_TORCH=)"

# --- setup on other machines ----------------------------------------------------------------------------------------
# A copy of the scripts that sees the files under $work/system, with no programs but these.
mkdir -p "$work/other/sources" "$work/other/src/hf" "$work/torch/lib" "$work/bin"
cp -r "$source/tools" "$work/other"
touch "$work/torch/lib/libtorch_cpu.so"
sed -i "s|\"\$1/etc/os-release\"|\"$work/system/etc/os-release\"|; s|\"\$1\"/usr/lib/rust|$work/none/usr/lib/rust|" \
  "$work/other/tools/machine.sh"
sed -i "s|/etc/apt/sources.list.d|$work/other/sources|" "$work/other/tools/setup"
for name in awk bash cat cut dirname env find flock grep head mkdir mktemp rm sed sort tail tee touch tr true uname; do
  ln -s "$(type -P "$name")" "$work/bin/$name"
done
program "$work/bin/id" 'echo 1000'
program "$work/bin/df" 'printf "head\ndev 1 1 90000000 1%% /\n"'
program "$work/bin/g++" 'case $1 in -E) cat >/dev/null ;; *) echo 12 ;; esac'
program "$work/bin/cmake" 'echo cmake version 3.25.1'
program "$work/bin/ninja"
program "$work/bin/python3"
program "$work/bin/curl"
program "$work/bin/apt-get" "echo \"\$*\" >>$work/apt-calls" 'case "$*" in' \
  '*Codename:\ bookworm*) echo http://mirror/debian ;;' 'indextargets*) echo http://third.party/apt ;;' \
  "update) [ ! -e $work/other/sources/tapetune-security.sources ] || { echo no Release file; exit 100; } ;;" 'esac'
program "$work/bin/apt-cache"
sudo_works() { program "$work/bin/sudo" '[ "$1" != -n ] || shift; exec "$@"'; }
installed() { program "$work/bin/dpkg-query" "printf $1"; }
setup() { # WORD…: with no network, and no root but by sudo
  rm -rf "$work/other/build" "$work/apt-calls"
  env -u CXX PATH="$work/bin" HOME="$work/user" CARGO_HOME="$work/user/.cargo" TAPETUNE_CACHE="$work/other-cache" \
    TAPETUNE_TORCH="$work/torch" "$work/other/tools/setup" "$@" 2>&1 </dev/null || echo "exit $?"
}
release "$work/system" debian 12 'Debian 12'
installed installed && sudo_works
expect "a mirror without the security suite leads to the remedy" \
  '*adding bookworm-security*error: \[setup\] Rust * is needed and apt cannot install it; run: curl *exit 1' "$(setup)"
expect "and leaves apt's sources as they were" '' "$(ls "$work/other/sources")"
expect "the mirror is asked of Debian's own sources" '*Codename: bookworm Origin: Debian*' "$(cat "$work/apt-calls")"

# Debian 13's archive; what apt installs is on the PATH afterwards.
program "$work/bin/apt-cache" 'case $1 in pkgnames) echo cargo-web ;; policy) echo "  Candidate: 1.96.0+dfsg1-1" ;; esac'
program "$work/bin/apt-get" "echo \"\$*\" >>$work/apt-calls" "case \"\$*\" in install*) cp $work/new/cargo $work/new/rustc $work/bin ;; esac"
ln -s "$(type -P cp)" "$work/bin/cp"
release "$work/system" debian 13 'Debian 13'
expect "apt installs the newest Rust" '*rust *installing cargo-web rustc-web*ok (*/bin/cargo 1.95.0)*' "$(setup)"
expect "and removes nothing" '*install * --no-remove cargo-web rustc-web*' "$(cat "$work/apt-calls")"
expect "which cargo was chosen is kept for builds" "$work/bin" "$(cat "$work/other-cache/rust")"
rm "$work/bin/cargo" "$work/bin/rustc" "$work/bin/cp" && release "$work/system" debian 12 'Debian 12'

installed missing
program "$work/bin/apt-get" 'echo "the user is not in the sudoers file"; exit 1'
expect "a sudo that refuses" '*error: \[setup\] apt-get update failed (the user is not in the sudoers file)*tools/setup --no-packages*' \
  "$(setup)"
rm "$work/bin/sudo"
rust "$work/bin" 1.95.0 1.95.0
expect "without root the packages are skipped" '*packages *skipped; CMake downloads*rust *ok (*/bin/cargo 1.95.0)*libtorch *ok (yours*' \
  "$(setup)"
sudo_works
expect "--no-packages" '*packages *skipped; CMake downloads*libtorch *ok (yours*' "$(setup --no-packages)"
expect "is kept for later builds" "$work/other/build/no-packages" "$(ls "$work/other/build/no-packages")"
rm "$work/bin/ninja" && rm "$work/bin/sudo"
expect "what nothing builds without needs root" '*error: \[setup\] root is needed once: sudo apt-get install -y ninja-build*exit 1' "$(setup)"
program "$work/bin/ninja"
program "$work/bin/cargo" '[ "$1" != fetch ] || { echo "error: spurious network error"; exit 101; }' 'echo cargo 1.95.0'
expect "crates that cannot be downloaded" \
  '*error: \[setup\] cannot download the Rust crates (error: spurious network error): check network and HTTPS_PROXY*exit 1' "$(setup)"

# --- build, test ----------------------------------------------------------------------------------------------------
program "$work/other/tools/setup" 'mkdir -p "${0%/tools/*}/build"; (cd "$TAPETUNE_TORCH" && pwd) >"${0%/tools/*}/build/torch"'
program "$work/bin/cmake" 'echo "TAPETUNE_TORCH=$TAPETUNE_TORCH"; [ "$1" != --preset ] || exit 1'
expect "CMake gets the absolute path of a relative TAPETUNE_TORCH" "TAPETUNE_TORCH=$work/torch" \
  "$(cd "$work"; TAPETUNE_TORCH=torch PATH=$work/bin:$PATH other/tools/build 2>&1 || true)"

for tool in setup build; do program "$work/other/tools/$tool"; done
program "$work/bin/ctest" 'echo "100% tests passed"; exit "$CTEST"'
program "$work/other-cache/python/bin/python" 'echo "FAILED test_a.py::test_b"; echo "1 failed"; exit "$PYTEST"'
tests() { # PYTEST-STATUS CTEST-STATUS: the last lines, without what pytest itself printed
  PYTEST=$1 CTEST=$2 PATH=$work/bin:$PATH TAPETUNE_CACHE=$work/other-cache "$work/other/tools/test" --interop 2>&1 |
    sed '1,/^1 failed/d' || true
  PYTEST=$1 CTEST=$2 PATH=$work/bin:$PATH TAPETUNE_CACHE=$work/other-cache "$work/other/tools/test" --interop >/dev/null 2>&1 ||
    echo "exit $?"
}
expect "an interop failure is said after ctest's results" \
  '100% tests passed*FAILED test_a.py::test_b*\[test\] interop FAILED (exit 1)*exit 1' "$(tests 1 0)"
expect "so is a success" '100% tests passed*\[test\] interop passed' "$(tests 0 0)"
expect "a failure of ctest is one" '*\[test\] interop passed*exit 8' "$(tests 0 8)"

# --- install, help --------------------------------------------------------------------------------------------------
program "$work/checkout/build/cpu/tapetune" 'echo it runs'
install() { HOME=$work/user PATH=$1:/usr/bin:/bin "$work/checkout/tools/install" 2>&1 || echo "exit $?"; }
expect "install says what to do about the PATH" '*local/bin is not on your PATH*export PATH=*' "$(install /nowhere)"
expect "a second time is fine, and silent on the PATH" '*/tapetune -> */build/cpu/tapetune' "$(install "$work/user/.local/bin")"
expect "the link runs" 'it runs' "$("$work/user/.local/bin/tapetune")"
program "$work/installs/cmake" '[ "$1 $3" = "--install --prefix" ] && mkdir -p "$4/bin"'
expect "--prefix" "*$work/prefix/bin/tapetune*" "$(PATH=$work/installs:$PATH "$work/checkout/tools/install" --prefix "$work/prefix" 2>&1)"
expect "--prefix needs a folder" 'error: \[install\] --prefix needs a folder*exit 2' \
  "$("$work/checkout/tools/install" --prefix 2>&1 || echo "exit $?")"
expect "tools/test -k needs a pattern" 'error: \[test\] -k needs a pattern*exit 2' \
  "$("$source/tools/test" -k 2>&1 || echo "exit $?")"
rm "$work/user/.local/bin/tapetune" && touch "$work/user/.local/bin/tapetune"
expect "a file that is not ours stays" 'error: \[install\]*not a link*exit 1' "$(install /nowhere)"

for tool in build fresh-check get-smollm2 install lint quickstart setup test; do
  expect "tools/$tool --help" "usage: tools/$tool*example: tools/$tool*" "$("$source/tools/$tool" --help)"
  expect "tools/$tool with an unknown option" '*exit 2' "$("$source/tools/$tool" --frobnicate 2>&1 || echo "exit $?")"
done

[ $failures = 0 ] || exit 1
echo "all as expected"
