# shellcheck shell=bash
# Sourced by ci/demo and ci/test: makes the virtual environments and puts ringcomm there.
#
#   require_tools                  install what this machine lacks, or exit 1 with the line that does
#   install_packages NAME...       from Debian or Ubuntu, as root or by a sudo that asks nothing
#   narrate WHAT PATTERN [PID]     show the lines of stdin that match; say every 10 s what goes on
#   make_venv VENV GROUP...        VENV holds ringcomm's requirements and those of these extras
#   install_ringcomm WERROR VENV.. each VENV holds the package built from these sources
#
# A second call costs a hash and asks no package index: stamps in each environment say what it
# holds. A stamp is taken away before the work it vouches for starts, so an interrupted one is redone.

set -euo pipefail
shopt -s inherit_errexit # a failure inside $(...) counts too

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
PYTHON=${PYTHON:-python3}
APT_PACKAGES="python3-dev python3-venv g++" # cmake and ninja come with the extra "build"
CONSTRAINTS=$ROOT/ci/constraints.txt
BUILDER=$ROOT/.venv # this environment builds the wheel for all of them, and has the one pip: it comes first

# What is tested is what is installed: nothing may come in beside it.
unset PYTHONPATH PYTHONHOME
# Without its byte code, which pip is asked not to make of all that nobody imports, each process that
# imports torch compiles it for 3 s.
unset PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [[ $(id -u) == 0 ]]; then # in a container; Open MPI's mpirun wants to hear it twice
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

BEAT_S=10         # the longest time without a word
QUIET_LIMIT_S=900 # who says nothing for so long hangs; a slow machine is no hang
LANE=             # stands before each line where two things are done at a time

say() { printf '%s%s: %s\n' "$LANE" "${0##*/}" "$*"; }

die() {
  say "$*" >&2
  exit 1
}

require_tools() {
  local missing line
  missing=$(missing_tools)
  [[ -n $missing ]] || return 0
  printf '%s\n' "$missing" >&2
  line="on Debian 12, Ubuntu 24.04 or newer: apt install $(apt_packages)"
  # shellcheck disable=SC2046 # a list of names
  install_packages $(apt_packages) || die "$line"
  missing=$(missing_tools)
  [[ -z $missing ]] || die "$missing"
}

install_packages() {
  local as_root=()
  command -v apt-get >/dev/null || return 1
  if [[ $(id -u) != 0 ]]; then
    sudo -n true 2>/dev/null || return 1
    as_root=(sudo -n)
  fi
  say "apt-get install $*"
  as_root+=(env DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends)
  { "${as_root[@]}" update && "${as_root[@]}" install "$@"; } 2>&1 | narrate "apt-get" '^(Setting up|E:|Err:)'
}

# A line that has not ended counts, too. Process PID is ended if nothing comes for QUIET_LIMIT_S.
narrate() {
  local what=$1 pattern=$2 pid=${3:-} limit=$QUIET_LIMIT_S signal=TERM
  local start=$SECONDS told=$SECONDS heard=$SECONDS code=0 newest='' line='' piece
  while [[ $code != 1 ]]; do # 1 is the end of the input, above 128 a second without a whole line
    code=0
    IFS= read -r -t 1 piece || code=$?
    line+=$piece
    [[ $code != 0 && -z $piece ]] || heard=$SECONDS
    [[ -z $line ]] || newest=$line
    if [[ $code -le 128 ]]; then
      if [[ $line =~ $pattern && ($code == 0 || -n $line) ]]; then
        printf '%s%s\n' "$LANE" "$line"
        told=$SECONDS
      fi
      line=''
    fi
    if ((SECONDS - told >= BEAT_S)); then
      say "$what, $((SECONDS - start)) s${newest:+: ${newest:0:100}}"
      told=$SECONDS
    fi
    if [[ -n $pid ]] && ((SECONDS - heard >= limit)); then
      say "$what said nothing for $limit s and gets SIG$signal"
      kill "-$signal" "$pid" || true
      [[ $signal == TERM ]] || return 1
      signal=KILL limit=20 heard=$SECONDS
    fi
  done
}

# Print a line for each thing that is missing, nothing if all is there.
missing_tools() {
  if ! "$PYTHON" -c '' 2>/dev/null; then
    echo "missing: Python 3.11 or newer ('$PYTHON' does not run)"
  else
    "$PYTHON" - <<'PY'
import os, sys, sysconfig
if sys.version_info < (3, 11):
    print("missing: Python 3.11 or newer (%s is %d.%d; choose another with PYTHON=...)"
          % ((sys.executable,) + sys.version_info[:2]))
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if not os.path.exists(header):
    print("missing: the headers of Python (%s)" % header)
try:
    import ensurepip, venv
except ImportError as error:
    print("missing: Python's venv and ensurepip (%s)" % error)
PY
  fi
  if ! compiler >/dev/null; then
    echo "missing: a C++ compiler (${CXX:-c++, g++ or clang++})"
  fi
}

compiler() {
  if [[ -n ${CXX:-} ]]; then
    command -v "${CXX%% *}" # CXX may carry options
  else
    command -v c++ || command -v g++ || command -v clang++
  fi
}

# Debian names the packages of a Python that is not the default one after its version.
apt_packages() {
  local name=${PYTHON##*/}
  [[ $name =~ ^python3\.[0-9]+$ ]] || name=python3
  printf '%s' "${APT_PACKAGES//python3/$name}"
}

make_venv() {
  local venv=$1 group
  shift
  local have=() lacking=()
  local id
  id=$(requirements_id)
  if [[ $(stamp "$venv" requirements | head -n 1) == "$id" ]]; then
    mapfile -t have < <(stamp "$venv" requirements | tail -n +2)
  else
    new_venv "$venv"
  fi
  for group in required "$@"; do
    [[ " ${have[*]:-} " == *" $group "* ]] || lacking+=("$group")
  done
  [[ ${#lacking[@]} == 0 ]] && return
  say "installing into ${venv##*/}: ${lacking[*]} (details in ${venv##*/}/pip.log)"
  clear_stamp "$venv" requirements
  requirements "${lacking[@]}" >"$venv/requirements.txt"
  pip_in "$venv" install --no-compile --constraint "$CONSTRAINTS" --requirement "$venv/requirements.txt"
  write_stamp "$venv" requirements "$id" "${have[@]}" "${lacking[@]}"
}

# Anything but what the stamp vouches for is made anew: a half-installed package, or one MPI left
# beside the other, is not worth finding out about.
new_venv() {
  local venv=$1 base options=(--without-pip)
  [[ $venv != "$BUILDER" ]] || options=()
  if [[ -e $venv || -L $venv ]] && [[ ! -e $venv/made-by-ci ]]; then
    die "$venv was not made by ci/setup.sh: move it away first"
  fi
  # From within an activated environment, $PYTHON may be the very one that is removed here.
  base=$("$PYTHON" -c 'import sys; print(sys._base_executable)')
  rm -rf "$venv"
  mkdir "$venv"
  touch "$venv/made-by-ci"
  say "making ${venv##*/}"
  "$base" -m venv "${options[@]}" "$venv" 2>&1 | narrate "making ${venv##*/}" .
  # The pip of Python 3.11 looks through the files of an index twice as long as newer ones.
  [[ $venv != "$BUILDER" ]] ||
    pip_in "$venv" install --no-compile --constraint "$CONSTRAINTS" --upgrade pip
}

# Print the requirements in these groups: extras, or "required" for those of the package itself.
requirements() {
  "$PYTHON" - "$ROOT/pyproject.toml" "$@" <<'PY'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
groups = {"required": project["dependencies"], **project["optional-dependencies"]}
for group in sys.argv[2:]:
    print(*groups[group], sep="\n")
PY
}

# Scripts carry the path of their interpreter, so an environment is good for one folder only.
requirements_id() {
  {
    "$PYTHON" - "$ROOT/pyproject.toml" <<'PY'
import json, sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print(sys.version, sys.base_prefix)
print(json.dumps([project["dependencies"], project["optional-dependencies"]]))
PY
    echo "$ROOT"
    cat "$CONSTRAINTS"
  } | digest
}

install_ringcomm() {
  local werror=$1 id venv
  shift
  id=$(sources_id)
  build_wheel "$id" "$werror"
  for venv in "$@"; do
    [[ $(stamp "$venv" ringcomm) == "$(stamp "$BUILDER" wheel)" ]] && continue
    say "installing ringcomm into ${venv##*/}"
    clear_stamp "$venv" ringcomm
    # --force-reinstall, for the version is the same
    pip_in "$venv" install --no-index --no-deps --force-reinstall "$BUILDER"/wheel/*.whl
    pip_in "$venv" check
    write_stamp "$venv" ringcomm "$(stamp "$BUILDER" wheel)"
  done
}

# Leave the wheel in $BUILDER/wheel. Without WERROR it may be one that a compiler of tomorrow warns of.
build_wheel() {
  local id=$1 werror=$2
  case $(stamp "$BUILDER" wheel) in
    "$id werror=ON" | "$id werror=$werror") return ;;
  esac
  say "building ringcomm, for some minutes (details in ${BUILDER##*/}/pip.log)"
  clear_stamp "$BUILDER" wheel
  rm -rf "$BUILDER/wheel"
  # One that was built under -Werror serves all: who begins with ci/demo builds once.
  if [[ $werror == ON ]]; then
    run_build ON
  elif ! (run_build ON); then
    say "building again, with warnings"
    run_build OFF
    write_stamp "$BUILDER" wheel "$id werror=OFF"
    return
  fi
  write_stamp "$BUILDER" wheel "$id werror=ON"
}

# A build folder of its own, not the one under build/ that editable installs use: CMake keeps the
# interpreter it found there.
run_build() {
  local options=${CXXFLAGS:-}
  # g++ looks for garbage in a tenth of its time, and finds little.
  [[ $("$(compiler)" --version) == *clang* ]] ||
    options+=" --param ggc-min-expand=1000 --param ggc-min-heapsize=1048576"
  CXXFLAGS=$options pip_in "$BUILDER" wheel --verbose --no-index --no-deps --no-build-isolation \
    --wheel-dir "$BUILDER/wheel" --config-settings build-dir="$BUILDER/build" \
    --config-settings cmake.define.RINGCOMM_WERROR="$1" "$ROOT"
}

sources_id() {
  (
    cd "$ROOT"
    find ringcomm csrc CMakeLists.txt pyproject.toml README.md LICENSE licenses ci/build_backend.py -type f \
      ! -name '*.pyc' ! -name '*.so' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  ) | digest
}

digest() { sha256sum | cut -d ' ' -f 1; }

# Run pip with its output in VENV/pip.log; show large downloads as they start, and the end on failure.
# The one pip is that of $BUILDER: another would take 5 s of a core to install.
pip_in() {
  local venv=$1
  shift
  "$BUILDER/bin/python" -m pip --python "$venv/bin/python" "$@" 2>&1 | tee -a "$venv/pip.log" |
    narrate "pip $1 in ${venv##*/}" 'Downloading .*\([0-9.]+ [MG]B\)' && return
  tail -n 40 "$venv/pip.log" >&2
  die "pip $1 failed in ${venv##*/}"
}

stamp() { cat "$1/$2.stamp" 2>/dev/null || true; }

clear_stamp() { rm -f "$1/$2.stamp"; }

write_stamp() {
  local file=$1/$2.stamp
  printf '%s\n' "${@:3}" >"$file.new"
  mv "$file.new" "$file"
}
