#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/vendor.sh: the library's dependencies in vendor/, whole or not at all.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_go "$(sed -n 's/^go //p' "$root/go.mod")"
lock vendor
scratch
cd "$root"
go mod vendor -o "$tmp/vendor" 2>"$tmp/err" || go_failed vendor/ "$tmp/err"
rm -rf vendor
mv "$tmp/vendor" vendor
say "vendor/ holds $(grep -c '^# ' vendor/modules.txt) modules"
