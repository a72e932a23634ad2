#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/upstream-tests.sh LINE [REGEXP]: upstream's tests on the stock and on the patched tree, compared
# test by test. hack/upstream-tests.txt lists the differences that are meant.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"
"$root/hack/fetch.sh" "$line"
"$root/hack/apply.sh" "$line"
hackgo upstreamtest -stock "$out/src/stock/$line" -patched "$tree" -known "$root/hack/upstream-tests.txt" -run "${2-}"
