#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/ci.sh [-short|-all] [STAGE,...]: the stages of "make test", all or those named; with -all, those of
# "make test-all".
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_go "$(sed -n 's/^go //p' "$root/hack/go.mod")"
flags=(-root "$root")
case ${1-} in -short | -all) flags+=("$1") && shift ;; esac
hackgo ci "${flags[@]}" -stages "${1-}"
