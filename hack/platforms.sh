#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/platforms.sh [--build] [LINE]: whether the patched tree compiles for other systems as stock does;
# without a LINE, whether the library does. Checks types, which takes seconds a system; --build compiles
# the library, or containerd and its CRI packages, for real.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
build=''
[ "${1-}" != --build ] || { build=1 && shift; }
platforms=(linux/arm64 windows/amd64 freebsd/amd64 darwin/arm64)
if [ -z "${1-}" ]; then
	hackgo typecheck -library "$root" "${platforms[@]}"
	[ -n "$build" ] || exit 0
	cd "$root"
	for p in "${platforms[@]}"; do
		say "building the library for $p"
		GOOS=${p%/*} GOARCH=${p#*/} CGO_ENABLED=0 go build ./... || die "the library does not build for $p: see above"
	done
	exit 0
fi
use_line "$1"
"$root/hack/fetch.sh" "$line"
"$root/hack/apply.sh" "$line"
hackgo typecheck -stock "$out/src/stock/$line" -patched "$tree" "${platforms[@]}"
[ -n "$build" ] || exit 0
cd "$tree"
for p in "${platforms[@]}"; do
	say "building $line for $p"
	GOOS=${p%/*} GOARCH=${p#*/} CGO_ENABLED=0 go build -mod=mod -trimpath -tags=urfave_cli_no_docs,static_build,netgo,osusergo \
		./cmd/containerd ./internal/cri/... ./plugins/cri/... || die "$line does not build for $p: see above"
done
