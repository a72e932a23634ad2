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
	what="the library" tree=$root flags=() packages=(./...)
	hackgo typecheck -library "$root" "${platforms[@]}"
else
	use_line "$1"
	what=$line flags=(-mod=readonly -trimpath "-tags=$tags")
	packages=(./cmd/containerd ./internal/cri/... ./plugins/cri/...)
	"$root/hack/fetch.sh" "$line"
	"$root/hack/apply.sh" "$line"
	hackgo typecheck -stock "$out/src/stock/$line" -patched "$tree" "${platforms[@]}"
fi
[ -n "$build" ] || exit 0
cd "$tree"
for p in "${platforms[@]}"; do
	say "building $what for $p"
	GOOS=${p%/*} GOARCH=${p#*/} CGO_ENABLED=0 go build "${flags[@]}" "${packages[@]}" || die "$what does not build for $p: see above"
done
