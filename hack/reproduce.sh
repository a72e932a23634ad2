#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/reproduce.sh LINE: builds the line once more, from a copy of the checkout in another folder and with an
# empty build cache, and compares the bytes.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"
"$root/hack/build.sh" "$line" >/dev/null
commit=$(library_commit) bin=$out/$line/linux-$(go env GOARCH)/bin
scratch
mkdir "$tmp/elsewhere" "$tmp/cache"
tar -C "$root" --exclude=./_output --exclude=./.git --exclude=./vendor -cf - . | tar -C "$tmp/elsewhere" -xf -
other=$(CNIRELOAD_COMMIT=$commit GOCACHE=$tmp/cache "$tmp/elsewhere/hack/build.sh" "$line")
for b in "$bin"/*; do
	cmp "$b" "$other/$(basename "$b")" || die "$(basename "$b") has other bytes when it is built elsewhere"
done
say "$line: the same bytes from another folder and an empty build cache"
