#!/bin/sh
# Tests ./run: the arguments that it passes to other programs and the output that it shows. The test runs a copy of the
# script and replaces the programs that it calls with stand-ins, which log their arguments. Usage: run_test.sh PATH_OF_RUN
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root/.ci" "$root/build/release/examples" "$work/bin" "$work/caller"
cp "$1" "$root/run"
printf '# comment\nmake\n# For ./run docs:\nsphinx\n# For .ci/run alone\nno-such-package\n' >"$root/.ci/packages"

stand_in() { # PATH COMMAND
  printf '#!/bin/sh\n%s\n' "$2" >"$1"
  chmod +x "$1"
}
stand_in "$work/bin/cmake" "echo noise; echo \"\$@\" >>'$work/log'; [ ! -e '$work/broken' ]"
stand_in "$work/bin/ctest" "echo ctest \"\$@\" >>'$work/log'"
stand_in "$work/bin/cpack" "mkdir -p build/package && touch build/package/a.deb"
stand_in "$work/bin/lintian" "echo lintian \"\$@\" >>'$work/log'"
stand_in "$work/bin/dpkg-query" 'case $* in *no-such-package*) exit 1 ;; esac; echo install ok installed'
stand_in "$work/bin/apt-get" 'exit 1'
stand_in "$work/bin/clang++" true
# Virtual environments contain only stand-ins, too. The stand-ins for pip and auditwheel create empty wheels.
python="echo python \"\$@\" in \$DLPACK_LIBRARY >>'$work/log'"
pip="echo pip \"\$@\" >>'$work/log'; [ \$1 != wheel ] || { mkdir -p build/wheel/local && touch build/wheel/local/a.whl; }"
auditwheel="echo auditwheel \"\$@\" >>'$work/log'; touch build/wheel/b.whl"
stand_in "$work/bin/python3" "case \$1 in docs/* | tests/*) echo python3 \"\$@\" >>'$work/log' ;; *) exec $(command -v python3) \"\$@\" ;; esac"
for venv in wheel-tools torch; do
  mkdir -p "$root/build/$venv/bin"
  stand_in "$root/build/$venv/bin/python" "$python"
  stand_in "$root/build/$venv/bin/pip" "$pip"
  stand_in "$root/build/$venv/bin/auditwheel" "$auditwheel"
done
for program in superres segment predict field; do
  stand_in "$root/build/release/examples/$program" "echo \"$program in \$(pwd) \$*\" >>'$work/log'"
done
PATH=$work/bin:$PATH
unset VOXGRAD_CUDA VOXGRAD_WERROR

# expect TEXT COMMAND... runs the command and fails unless the log of the stand-ins contains TEXT.
expect() {
  text=$1
  shift
  : >"$work/log"
  (cd "$work/caller" && "$@") >"$work/output" 2>&1 || { cat "$work/output"; exit 1; }
  grep -qF -e "$text" "$work/log" || { echo "'$*' did not lead to '$text':"; cat "$work/log"; exit 1; }
}

expect "superres in $work/caller --volume x.nii --out y" ../root/run demo --volume x.nii --out y
expect "field in $work/caller --steps 5" ../root/run field --steps 5
expect "predict in $work/caller model a.nii b.nii" ../root/run predict model a.nii b.nii
expect "segment in $work/caller --steps 100" ../root/run predict
expect "predict in $work/caller out/predict/model" ../root/run predict
expect "-U VOXGRAD_CUDA -U VOXGRAD_WERROR" ../root/run build
expect "-DVOXGRAD_CUDA=OFF -DVOXGRAD_WERROR=ON" env VOXGRAD_CUDA=OFF VOXGRAD_WERROR=ON ../root/run build
expect "--no-tests=error -R name" ../root/run test -R name
expect "--target core_tests nn_tests" ../root/run sanitize core nn
expect "-L ^core\$|^nn\$" ../root/run sanitize core nn
expect "-DVOXGRAD_EXAMPLES=OFF" ../root/run sanitize
expect "-DVOXGRAD_EXAMPLES=ON" ../root/run sanitize examples
expect "python3 tests/fuzz/fuzz.py 5 --jobs 2 npy" ../root/run fuzz 5 --jobs 2 npy
expect "-DVOXGRAD_PACKAGE=ON -DBUILD_SHARED_LIBS=ON" env VOXGRAD_CUDA=OFF ../root/run package
expect "--allow-root build/package/a.deb" env VOXGRAD_CUDA=OFF ../root/run package
expect "python3 docs/site/build.py" ../root/run docs
expect "auditwheel repair --wheel-dir build/wheel build/wheel/local/a.whl" ../root/run wheel
expect "cmake.define.VOXGRAD_CUDA=OFF" env VOXGRAD_CUDA=OFF ../root/run wheel
expect "cmake.define.VOXGRAD_TESTS=ON" ../root/run test-pytorch
expect "pip install --force-reinstall --no-deps $root/build/wheel/b.whl" ../root/run test-pytorch
expect "python -m pytest tests/pytorch -k name in $root/build/python/tests/libdlpack" ../root/run test-pytorch -k name

# --help neither installs nor builds anything.
for command in build test sanitize coverage docs wheel package package-test test-pytorch; do
  : >"$work/log"
  "$root/run" $command --help | grep -q "usage: ./run COMMAND" || { echo "'run $command --help' prints no help"; exit 1; }
  [ ! -s "$work/log" ] || { echo "'run $command --help' did:"; cat "$work/log"; exit 1; }
done

code=0
"$root/run" nonsense >/dev/null 2>&1 || code=$?
[ $code -eq 2 ] || { echo "'run nonsense' exited with $code, expected 2"; exit 1; }

# The output of the tools goes to a log file. After a failure, ./run prints the end of the log and its path.
output=$("$root/run" build 2>&1)
case $output in *noise*) echo "'run build' prints the output of cmake: $output"; exit 1 ;; esac
touch "$work/broken"
if output=$("$root/run" build 2>&1); then echo "'run build' hides the failure of cmake"; exit 1; fi
case $output in
  *"$root/build/run.log"*noise*) ;;
  *) echo "'run build' shows neither the log nor its path: $output"; exit 1 ;;
esac
