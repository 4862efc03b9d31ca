#!/bin/sh
# Tests `./run release --quick` in a clone of the repository, with the uncommitted changes of tracked files. Usage:
# release_test.sh ROOT [--full]. With --full, also builds the source archive completely, installs it, and builds and runs
# tests/consumer against the installed library; CI does not do this, because it takes as long as ./run build. Exits with
# 77 (skipped) if ROOT is not a git repository.
set -eu
root=$(cd "$1" && pwd)
git() { command git -c safe.directory='*' "$@"; }
command -v git >/dev/null && git -C "$root" rev-parse -q --verify HEAD >/dev/null 2>&1 || exit 77
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GIT_AUTHOR_NAME=test GIT_AUTHOR_EMAIL=test@localhost GIT_COMMITTER_NAME=test GIT_COMMITTER_EMAIL=test@localhost
git clone -q -u 'git -c safe.directory=* upload-pack' "$root" "$work/clone"
git -C "$root" diff --binary HEAD >"$work/changes"
cd "$work/clone"
git checkout -q -B release
if [ -s "$work/changes" ]; then
  git apply --index "$work/changes"
  git commit -qm "Uncommitted changes"
fi
version=$(sed -n 's/^project(voxgrad VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
# After a release, the change log has no section marked "unreleased" until the next version is begun.
if ! grep -q "^## $version - unreleased" CHANGELOG.md; then
  sed -i "s/^## $version - .*/## $version - unreleased/" CHANGELOG.md
  git commit -qam "Unreleased section"
fi
git tag -d "v$version" >/dev/null 2>&1 || :
head=$(git rev-parse HEAD)

# rejects REASON ARGUMENTS... fails unless `./run release ARGUMENTS` fails with this reason and changes nothing.
rejects() {
  reason=$1
  shift
  if ./run release "$@" >"$work/output" 2>&1; then echo "'release $*' succeeded, expected '$reason'"; exit 1; fi
  grep -qF -e "$reason" "$work/output" || { echo "'release $*' did not report '$reason':"; cat "$work/output"; exit 1; }
  [ "$(git rev-parse HEAD)" = "$head" ] && [ -z "$(git tag -l "v$version")" ] ||
    { echo "'release $*' changed the repository"; exit 1; }
}
rejects "./run release VERSION" --quick
rejects "CMakeLists.txt has the version $version" 99.0.0 --quick
touch new_file
rejects "the working tree has changes" "$version" --quick
rm new_file

# If a late check fails, the repository must not change.
cp .ci/check-links "$work/check-links"
printf '#!/bin/sh\nexit 1\n' >.ci/check-links
git commit -qam "A check that fails"
head=$(git rev-parse HEAD)
rejects "== .ci/check-links" "$version" --quick
cp "$work/check-links" .ci/check-links
git commit -qam "The check as before"

./run release "$version" --quick >"$work/output" 2>&1 || { cat "$work/output"; exit 1; }
out=build/release-$version
[ "$(git rev-parse HEAD)" = "$(git rev-parse "v$version^{commit}")" ] || { echo "the tag is not the head"; exit 1; }
grep -qE "^## $version - [0-9]{4}-[0-9]{2}-[0-9]{2}\$" CHANGELOG.md || { echo "the change log has no date"; exit 1; }
[ -z "$(git status --porcelain)" ] || { echo "the working tree has changes"; exit 1; }
(cd "$out" && sha256sum --quiet -c SHA256SUMS)
grep -q "$(sha512sum "$out/voxgrad-$version.tar.gz" | cut -d' ' -f1)" "$out/vcpkg/portfile.cmake" ||
  { echo "the port of vcpkg does not have the checksum of the archive"; exit 1; }
python3 -m json.tool "$out/vcpkg/vcpkg.json" >/dev/null
python3 -m json.tool "$out/voxgrad-$version.spdx.json" >/dev/null

if [ "${2:-}" = --full ]; then
  tar -xzf "$out/voxgrad-$version.tar.gz" -C "$work"
  cmake -S "$work/voxgrad-$version" -B "$work/full" -G Ninja -DVOXGRAD_CUDA=OFF -DVOXGRAD_WERROR=ON >"$work/output"
  cmake --build "$work/full" >"$work/output" || { tail -n 40 "$work/output"; exit 1; }
  ctest --test-dir "$work/full" --output-on-failure --no-tests=error -R '^(consumer|core)$'
fi
