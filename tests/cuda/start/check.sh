#!/bin/sh
# Checks that the programs of a CUDA build start without CUDA's libraries, and that they report what is missing.
#
#   check.sh BUILD CUBLAS_FOLDER [NCCL_FOLDER]
#
# BUILD is the build folder. NCCL_FOLDER is omitted for a build without NCCL. If the system permits it, the script runs
# itself in a mount namespace, in which /dev/null hides the libraries. Usually only root may create such a namespace.
set -eu
if [ "$1" != --hidden ] && unshare -m true 2>/dev/null; then
  exec unshare -m sh "$0" --hidden "$@"
fi
hidden=no
if [ "$1" = --hidden ]; then
  hidden=yes
  shift
fi
build=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ $hidden = yes ]; then
  for folder; do
    for file in "$folder"/libcublas*.so.* "$folder"/libcudart.so.* "$folder"/libnccl.so.*; do
      [ ! -f "$file" ] || mount --bind /dev/null "$file"
    done
  done
fi

fail() {
  echo "check.sh: $*" >&2
  exit 1
}

# fails_with TEXT VARIABLE=VALUE... COMMAND...: checks that the command fails and that its output contains the text.
fails_with() {
  text=$1
  shift
  if output=$(env "$@" 2>&1); then
    fail "$* succeeded: $output"
  fi
  case $output in
    *"$text"*) ;;
    *) fail "the output of $* has no '$text': $output" ;;
  esac
}

# No program or library lists a library of CUDA as a dependency. Only bench/scaling links NCCL, which it measures.
for file in "$build"/examples/* "$build"/examples/pytorch/*.so "$build"/tests/*_tests "$build"/libvoxgrad.so; do
  if [ -f "$file" ] && [ -x "$file" ]; then
    needed=$(readelf -d "$file" | grep NEEDED)
    if echo "$needed" | grep -E 'libcu|libnccl|libnv'; then
      fail "$file depends on a library of CUDA"
    fi
  fi
done

superres="$build/examples/superres --phantom --batch 1 --patch 8 --channels 4 --layers 1 --steps 3 --out $work/out"
# shellcheck disable=SC2086
$superres --device cpu >"$work/log" 2>&1 || fail "superres --device cpu failed: $(cat "$work/log")"

# The dynamic linker rejects an empty file and stops its search there. The library is then missing, even if another
# folder contains it.
mkdir "$work/libraries"
for name in libcuda.so.1 libcublas.so.12 libcublas.so.13 libnccl.so.2; do
  : >"$work/libraries/$name"
done
missing=LD_LIBRARY_PATH=$work/libraries:${LD_LIBRARY_PATH-}
# shellcheck disable=SC2086
{
  fails_with "superres: cuda:0 is not available: the NVIDIA driver is missing (" "$missing" $superres --device cuda
  fails_with "superres: cuda:0 is not available: the NVIDIA driver is missing (" "$missing" $superres --gpus 1
  fails_with "superres: cuda:0 is not available: the NVIDIA driver is too old: it supports CUDA 11.8, but" \
    LD_LIBRARY_PATH="$build/tests/old_driver" $superres --device cuda
}

# On a GPU, the first use of a library reports that the library is missing.
rm "$work/libraries/libcuda.so.1"
if [ $hidden = no ]; then
  echo "not tested without cuBLAS and NCCL: mount namespaces are not permitted"
elif ! "$build/examples/kernelbench" --device cuda --model 77 --steps 1 >"$work/log" 2>&1; then
  echo "not tested without cuBLAS and NCCL: $(tail -n 1 "$work/log")"
else
  fails_with "matmul: cannot load libcublas.so." "$missing" \
    "$build/tests/ops_tests" "--gtest_filter=*MatchesReference/matmul_matrices_CUDA"
  [ $# -eq 1 ] || fails_with "distributed: cannot load libnccl.so." "$missing" VOXGRAD_TEST_DEVICE=cuda \
    "$build/tests/distributed_tests" "--gtest_filter=*Ranks.*"
fi
