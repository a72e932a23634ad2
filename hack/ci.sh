#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/ci.sh [-short] [STAGE,...]: the stages of "make test", all or those named.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_go "$(sed -n 's/^go //p' "$root/hack/go.mod")"
flags=(-root "$root")
[ "${1-}" != -short ] || { flags+=(-short) && shift; }
hackgo ci "${flags[@]}" -stages "${1-}"
