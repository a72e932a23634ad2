#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/cri-integration.sh LINE [REGEXP]: upstream's CRI integration tests against a stock and a patched
# daemon, compared test by test. test/cmd/criintegration/tests.txt lists those that are left out.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"
[ "$(id -u)" = 0 ] || die "needs root for mounts and namespaces: run it with sudo"
"$root/hack/deps.sh"
debs=$("$root/hack/debs.sh")
for busybox in "$debs"/busybox/{usr/,}bin/busybox; do [ ! -x "$busybox" ] || break; done
"$root/hack/build.sh" "$line" >/dev/null
"$root/hack/build.sh" --stock "$line" >/dev/null
"$root/hack/tools.sh" node test >/dev/null
lock "cri-integration-$line"
scratch
work=$out/cri-integration
export CGO_ENABLED=0

# build SIDE TREE MOD: the test program and the plugin, shims and runc with failures built in.
build() {
	# shellcheck disable=SC2054 # the tags are one argument
	local cmd flags=(-mod="$3" -trimpath -buildvcs=false -tags="$tags" "-ldflags=-s -w")
	mkdir -p "$work/$1"
	say "building upstream's integration tests of $1 $line"
	cd "$2"
	go test -c "${flags[@]}" -o "$work/$1/cri-integration.test" ./integration 2>"$tmp/err" || go_failed "the integration tests of $1 $line" "$tmp/err"
	for cmd in integration/failpoint/cmd/*/; do
		go build "${flags[@]}" -o "$work/$1/$(basename "$cmd")" "./$cmd" 2>"$tmp/err" || go_failed "$cmd of $1 $line" "$tmp/err"
	done
}
build stock "$out/src/stock/$line" readonly
build patched "$tree" mod

cd "$root/test"
go build -o "$out/hack/criintegration" ./cmd/criintegration
"$out/hack/criintegration" -work "$work" -busybox "$busybox" -run "${2-}"
