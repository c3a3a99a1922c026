# shellcheck shell=bash
# What this machine has: system, Rust, cores, memory, disk. Sourced by the other tools. Functions that read system files
# take the root of the file tree as ROOT, which is empty except in tests.

# --- system ---------------------------------------------------------------------------------------------------------
supported="tapetune is tested on Debian 12 and 13, x86-64; Ubuntu 24.04 or newer should work"

os_field() { # ROOT NAME: a field of /etc/os-release, without quotes
  sed -n "s/^$2=//p" "$1/etc/os-release" 2>/dev/null | tr -d "\"'"
}

at_least() { # MINIMUM VERSION
  [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]
}

# Prints why this system is refused, or a note about what is untried. Exit code: 0 supported, 1 refused, 2 untried.
check_system() { # ROOT KERNEL MACHINE, the last two as `uname -s` and `uname -m` print them
  local id version oldest=''
  case $2 in
    Linux) ;;
    Darwin) echo "macOS is not supported: $supported; a Linux container or virtual machine works"; return 1 ;;
    *) echo "$2 is not supported: $supported"; return 1 ;;
  esac
  id=$(os_field "$1" ID) version=$(os_field "$1" VERSION_ID)
  case $id in
    debian) oldest=12 ;;
    ubuntu) oldest=24.04 ;;
  esac
  # Debian testing and unstable have no version.
  if [ -n "$oldest" ] && [ -n "$version" ] && ! at_least "$oldest" "$version"; then
    echo "$(os_field "$1" PRETTY_NAME) is too old (C++20 needs gcc 12 and CMake 3.24): $supported; a container works"
    return 1
  fi
  case $3 in
    x86_64) ;;
    aarch64) echo "aarch64 is untried: $supported"; return 2 ;;
    *) echo "$3 is not supported: $supported"; return 1 ;;
  esac
  if [ "$id" = ubuntu ]; then
    echo "Ubuntu is untried: $supported"
    return 2
  fi
  if [ -z "$oldest" ]; then
    echo "${id:-this distribution} is untried: $supported"
    return 2
  fi
}

cache_dir() { # downloads and compiled crates, shared by all checkouts
  echo "${TAPETUNE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tapetune}"
}

# --- Rust -----------------------------------------------------------------------------------------------------------
rust_needed=1.88 # what cxx 1.0.205 asks for

rust_version() { # CARGO: its version, if that and its rustc's are new enough
  local folder cargo rustc
  folder=$(dirname "$1")
  cargo=$("$1" --version 2>/dev/null | awk '{print $2}')
  rustc=$(PATH=$folder:$PATH rustc --version 2>/dev/null | awk '{print $2}')
  [ -n "$cargo" ] && [ -n "$rustc" ] && at_least "$rust_needed" "$cargo" && at_least "$rust_needed" "$rustc" && echo "$cargo"
}

find_cargo() { # ROOT: the first cargo that is new enough: on the PATH, rustup's, Ubuntu's numbered packages
  local cargo
  while read -r cargo; do
    if rust_version "$cargo" >/dev/null; then
      echo "$cargo"
      return
    fi
  done < <(
    type -ap cargo
    printf '%s\n' "${CARGO_HOME:-$HOME/.cargo}/bin/cargo"
    printf '%s\n' "$1"/usr/lib/rust-1.*/bin/cargo | sort -rV
  )
  return 1
}

apt_cargo() { # the packages with the newest cargo that apt offers, if that is new enough
  local name version best='' packages=''
  # Debian has cargo-web beside a cargo that is never updated; Ubuntu has cargo-1.N.
  for name in $(apt-cache pkgnames cargo | grep -xE 'cargo(-web|-1\.[0-9]+)?'); do
    version=$(apt-cache policy "$name" | sed -n 's/^ *Candidate: \([0-9]*:\)\?\([0-9.]*\).*/\2/p')
    if [ -n "$version" ] && at_least "${best:-$rust_needed}" "$version"; then
      best=$version packages="$name rustc${name#cargo}"
    fi
  done
  [ -n "$packages" ] && echo "$packages"
}

rust_remedy() { # the command that installs Rust without root
  if command -v rustup >/dev/null; then
    echo "rustup update stable"
  elif [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/rustup" ]; then
    echo "${CARGO_HOME:-$HOME/.cargo}/bin/rustup update stable"
  elif command -v curl >/dev/null; then
    echo "curl -sSf https://sh.rustup.rs | sh -s -- -y"
  else
    echo "wget -qO- https://sh.rustup.rs | sh -s -- -y"
  fi
}

# --- cores and memory -----------------------------------------------------------------------------------------------
cgroup_files() { # ROOT CONTROLLER NAME: that file of this process's control group and of all its parent groups
  local controllers path base
  while IFS=: read -r _ controllers path; do
    case ",$controllers," in
      ,,) set -- "$1" "$2" "$3" /sys/fs/cgroup /sys/fs/cgroup/unified ;; # version 2
      *,"$2",*) set -- "$1" "$2" "$3" "/sys/fs/cgroup/$2" ;;             # version 1
      *) continue ;;
    esac
    # In a container the path may be the host's: then only the root of the mount exists.
    path=${path%/}
    while true; do
      for base in "${@:4}"; do
        if [ -r "$1$base$path/$3" ]; then echo "$1$base$path/$3"; fi
      done
      [ -n "$path" ] || break
      path=${path%/*}
    done
  done < <(cat "$1/proc/self/cgroup" 2>/dev/null)
}

usable_cores() { # ROOT: of this process's affinity and the CPU quotas of its control groups, rounded up
  local cores file quota period
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
  while read -r file; do
    period=100000
    case $file in
      *cpu.max) read -r quota period <"$file" ;;
      *) read -r quota <"$file"; read -r period <"${file%quota_us}period_us" ;;
    esac
    case $quota in max | -1) continue ;; esac
    quota=$(((quota + period - 1) / period))
    [ "$quota" -ge "$cores" ] || cores=$quota
  done < <(cgroup_files "$1" cpu cpu.max; cgroup_files "$1" cpu cpu.cfs_quota_us)
  echo "$cores"
}

usable_memory() { # ROOT: MB that are available and within the limits of the control groups
  local memory file limit
  memory=$(awk '/^MemAvailable:/ {print int($2 * 1.024 / 1000)}' "$1/proc/meminfo")
  while read -r file; do
    read -r limit <"$file"
    [ "$limit" != max ] || continue
    limit=$((limit / 1000000))
    [ "$limit" -ge "$memory" ] || memory=$limit
  done < <(cgroup_files "$1" memory memory.max; cgroup_files "$1" memory memory.limit_in_bytes)
  echo "$memory"
}

choose_jobs() { # ROOT: sets `jobs`, and `jobs_reason` in words; a compiler or a test takes up to 1.5 GB
  local cores memory
  cores=$(usable_cores "$1") memory=$(usable_memory "$1")
  jobs=$((memory / 1500))
  [ "$jobs" -le "$cores" ] || jobs=$cores
  [ "$jobs" -ge 1 ] || jobs=1
  # shellcheck disable=SC2034 # read by those who source this
  jobs_reason="$cores core$([ "$cores" = 1 ] || echo s), $((memory / 1000)).$((memory % 1000 / 100)) GB of memory, 1.5 GB per job"
}

# --- disk -----------------------------------------------------------------------------------------------------------
disk_shortage() { # pairs FOLDER MB: prints what is missing; folders on the same file system are added up
  local folder
  while [ $# -gt 1 ]; do
    folder=$1
    until [ -d "$folder" ]; do folder=$(dirname "$folder"); done
    df -Pk "$folder" | awk -v need="$2" -v folder="$1" 'NR == 2 {print $6, int($4 * 1.024 / 1000), need, folder}'
    shift 2
  done | awk '
    {free[$1] = $2; need[$1] += $3; folders[$1] = folders[$1] (folders[$1] ? ", " : "") $4}
    END {for (disk in need) if (need[disk] > free[disk]) {
      printf "%.1f GB are needed in %s, but %s has %.1f GB free\n", need[disk] / 1000, folders[disk], disk, free[disk] / 1000
      exit
    }}'
}
