#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/clean.sh: removes what was made. Keeps a patched tree that holds edits.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
for f in "$root"/patches/*/BASE; do
	l=$(basename "$(dirname "$f")")
	[ ! -d "$out/src/$l" ] || ! edited "$out/src/$l" ||
		die "_output/src/$l holds edits of yours: hack/refresh.sh $l keeps them, hack/apply.sh --force $l throws them away"
done
mounts=$(grep -c " $out/" /proc/self/mounts || true)
[ "$mounts" = 0 ] || die "$mounts mounts are below _output: stop the daemon that runs there first"
rm -rf "$out" "$root/vendor"
