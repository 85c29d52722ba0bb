#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prepares the controller. `toolchain.sh python`: .venv as uv.lock says; `toolchain.sh system`: podman and
# its helpers; `toolchain.sh lock`: resolve uv.lock anew. Quick when there is nothing to do; every step can be
# repeated after an interruption, because its stamp is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.gpubox-toolchain
os_release=${GPUBOX_OS_RELEASE:-/etc/os-release} # unit tests stand in another distribution's

say() { printf '[toolchain] %s\n' "$*"; }
fail() { # measured, wanted, do: the shape of every gpubox error
  printf 'measured: %s\nwanted: %s\ndo: %s\n' "$1" "$2" "$3" >&2
  exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# --- Python -------------------------------------------------------------------------------------------------

# The newest of the versions that this repository is tested with; $GPUBOX_PYTHON overrides the search.
find_python() {
  local version candidate
  for version in 3.13 3.12; do
    for candidate in ${GPUBOX_PYTHON:-} "python$version" "$HOME"/.pyenv/versions/"$version"*/bin/python3 /usr/bin/python3; do
      # a pyenv shim exists for versions that are not selected: only an interpreter that answers counts
      if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
        # of a virtual environment (ours may be on PATH) the interpreter that it was made with
        "$candidate" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
        return
      fi
    done
  done
}

# The uv of tools/uv.txt: the one on PATH if it is that version, else installed (with hashes) by pip.
find_uv() {
  local pin wanted python=${1:-python3}
  pin=$(sed -n 's/^uv==\([^ ]*\).*/\1/p' tools/uv.txt)
  wanted="uv $pin"
  if have uv && [[ "$(uv --version 2>/dev/null)" == "$wanted"* ]]; then
    echo uv
    return
  fi
  if [[ "$(.cache/uv-venv/bin/uv --version 2>/dev/null)" != "$wanted"* ]]; then
    say "installing uv $pin" >&2
    rm -rf .cache/uv-venv
    if ! "$python" -m venv .cache/uv-venv >/dev/null 2>&1; then
      rm -rf .cache/uv-venv
      if [ "$(id -u)" = 0 ] && have apt-get; then
        apt_install python3-venv >&2
        "$python" -m venv .cache/uv-venv
      else
        fail "$python has neither pip nor venv, and there is no uv $pin on PATH" "a way to install uv" \
          "run: sudo apt-get install -y python3-venv   (or install uv $pin), then repeat"
      fi
    fi
    .cache/uv-venv/bin/pip install -q --disable-pip-version-check --require-hashes -r tools/uv.txt ||
      fail "pip could not install uv $pin (its message is above)" "a package index that answers" \
        "check the network, or set PIP_INDEX_URL (and PIP_CERT) to your mirror, then repeat"
  fi
  echo .cache/uv-venv/bin/uv
}

# uv does not read pip's settings: hand over the index that the operator configured for pip.
hand_over_index() {
  if [ -z "${UV_DEFAULT_INDEX:-}" ] && [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX=$PIP_INDEX_URL; fi
  if [ -z "${SSL_CERT_FILE:-}" ] && [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE=$PIP_CERT; fi
}

setup_python() {
  local wanted uv python
  wanted=$(cat uv.lock pyproject.toml tools/uv.txt tools/toolchain.sh | sha256sum)
  if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$wanted" ]; then return; fi
  mkdir -p .cache
  hand_over_index
  python=$(find_python)
  uv=$(find_uv "$python")
  say "installing the locked environment into $venv (python: ${python:-one that uv fetches})"
  # uv.lock names no host, so that any index serves it: it is exported as pins with hashes and synced.
  "$uv" export --frozen --all-groups --no-emit-project -q -o .cache/requirements.txt
  if ! $venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    "$uv" venv -q --clear --python "${python:->=3.12}" $venv ||
      fail "no CPython 3.12 or 3.13 on PATH or under ~/.pyenv, and uv could not fetch one" "CPython >= 3.12" \
        "install python3.13 or python3.12, or set GPUBOX_PYTHON to one, then repeat"
  fi
  "$uv" pip sync -q --python $venv/bin/python --require-hashes .cache/requirements.txt ||
    fail "uv could not install the locked packages (its message is above)" "a package index that answers" \
      "check the network, or set UV_DEFAULT_INDEX (and SSL_CERT_FILE) to your mirror, then repeat"
  printf '%s\n' "$wanted" >$stamp
}

# --- system packages ----------------------------------------------------------------------------------------

apt_install() {
  say "apt-get install $*"
  DEBIAN_FRONTEND=noninteractive apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

setup_system() {
  local command packages=() id
  # command: package; the ones that only some machines need are installed where apt can, see demo/image.py
  local needs=(podman:podman runc:runc conmon:conmon iptables:iptables newuidmap:uidmap mmdebstrap:mmdebstrap zstd:zstd)
  [ "$(id -u)" = 0 ] && have apt-get || needs=(podman:podman)
  for command in "${needs[@]}"; do
    have "${command%%:*}" || packages+=("${command##*:}")
  done
  [ ${#packages[@]} = 0 ] && return
  # podman's network programs lie outside PATH
  [ "$(id -u)" = 0 ] && packages+=(netavark aardvark-dns)
  if [ "$(id -u)" = 0 ] && have apt-get; then
    apt_install "${packages[@]}" || fail "apt-get could not install ${packages[*]} (its message is above)" \
      "podman and its helpers" "check the network and the apt sources, then repeat"
    return
  fi
  id=$(sed -n 's/^ID\(_LIKE\)\?=//p' "$os_release" 2>/dev/null | tr -d '"' | tr '\n' ' ')
  case " $id " in
    *debian* | *ubuntu*) command="sudo apt-get install -y podman uidmap netavark aardvark-dns mmdebstrap zstd" ;;
    *fedora* | *rhel* | *centos*) command="sudo dnf install -y podman" ;;
    *arch*) command="sudo pacman -S podman" ;;
    *) command="install podman 4.3 or newer with your system's package manager" ;;
  esac
  fail "there is no podman on PATH, and this is not root on a system with apt" "podman 4.3 or newer" \
    "run: $command   (then repeat)"
}

# --- uv.lock ------------------------------------------------------------------------------------------------

# Resolve again; then take the hosts out, because every index must be able to serve the same lock.
relock() {
  hand_over_index
  local uv
  uv=$(find_uv "$(find_python)")
  cp uv.lock .cache/uv.lock.before
  "$uv" lock -q
  sed -i -E 's#registry = "https?://[^"]*"#registry = "https://index.invalid/simple"#; s#url = "https?://[^/"]+/#url = "https://files.invalid/#' uv.lock
  say "uv.lock resolved; what changed: git diff --stat uv.lock"
}

case ${1:-} in
  python) setup_python ;;
  system) setup_system ;;
  lock) mkdir -p .cache && relock ;;
  *) fail "argument '${1:-}'" "python, system or lock" "run make setup" ;;
esac
