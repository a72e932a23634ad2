#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/checksums.sh [--write] LINE: compares the binaries of the line for this machine with
# patches/LINE/CHECKSUMS, which was made from the commit that it names. With --write, makes the file from
# builds for amd64 and arm64.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
write=''
[ "${1-}" != --write ] || { write=1 && shift; }
use_line "${1-}"
file=$patches/CHECKSUMS commit=$(library_commit)

# sums ARCH: those of the binaries in _output.
sums() { (cd "$out/$line" && sha256sum "linux-$1"/bin/*); }

if [ -n "$write" ]; then
	case $commit in *-dirty | unknown) die "commit $commit: commit everything first" ;; esac
	[ "$(go env GOVERSION)" = "go$base_go" ] || die "this is $(go env GOVERSION), checksums are of go$base_go: unset GOTOOLCHAIN=local"
	scratch
	echo "# commit $commit" >"$tmp/sums"
	for arch in amd64 arm64; do
		GOARCH=$arch "$root/hack/build.sh" "$line" >/dev/null
		sums $arch >>"$tmp/sums"
	done
	mv "$tmp/sums" "$file"
	say "patches/$line/CHECKSUMS is of commit $commit"
	exit 0
fi

"$root/hack/build.sh" "$line" >/dev/null
made=$(sed -n 's/^# commit //p' "$file" 2>/dev/null || true)
if [ "$made" != "$commit" ]; then
	printf '1 skipped: patches/%s/CHECKSUMS is of commit %s, this is %s\n0 passed, 0 failed, 1 skipped\n' "$line" "${made:-none}" "$commit"
	exit 0
fi
sums "$(go env GOARCH)" | diff <(grep "linux-$(go env GOARCH)/" "$file") - ||
	die "the binaries are not those of patches/$line/CHECKSUMS (<), though commit and Go version are the same"
echo "1 passed, 0 failed"
