#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/upstream-tests.sh [--race] LINE [REGEXP]: upstream's tests on the stock and on the patched tree,
# compared test by test. hack/upstream-tests.txt lists the differences that are meant. With --race both
# run with the race detector.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
race=''
[ "${1-}" != --race ] || { race=-race && shift; }
use_line "${1-}"
[ -z "$race" ] || need gcc
"$root/hack/fetch.sh" "$line"
"$root/hack/apply.sh" "$line"
hackgo upstreamtest -stock "$out/src/stock/$line" -patched "$tree" -known "$root/hack/upstream-tests.txt" -run "${2-}" $race
