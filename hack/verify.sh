#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/verify.sh LINE: proves that the line's patches apply to the pinned sources exactly, that
# writing them back gives the same bytes, and that their headers say what they must. Works on a
# copy: _output/src/LINE stays as it is.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"
need git
hackgo patchlint "$patches"
scratch
apply_to "$tmp/tree"
export_patches "$tmp/tree" "$tmp/export"
series | sort >"$tmp/series"
(cd "$tmp/export" && find . -name '*.patch' -printf '%f\n' | sort) | diff "$tmp/series" - >/dev/null ||
	die "patches/$line/series is not what hack/refresh.sh $line would write: run it"
matrix >"$tmp/README.md"
cmp -s "$tmp/README.md" "$root/patches/README.md" || die "patches/README.md is not what hack/refresh.sh $line would write: run it"
echo "patches/$line: $(series | wc -l) patches apply to $module $version and come back byte for byte"
