#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/refresh.sh LINE: writes the commits of _output/src/LINE back as patches/LINE/NNNN-subject.patch
# and series, and patches/README.md. The same commits always give the same bytes.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"
need git
lock "src-$line"
[ -d "$tree" ] || die "no _output/src/$line: run hack/apply.sh $line first"
[ -z "$(dirty "$tree")" ] || die "_output/src/$line has changes that are in no commit: commit or undo them first"
[ "$(tgit "$tree" rev-parse HEAD)" != "$(tgit "$tree" rev-parse refs/cnireload/base)" ] ||
	die "_output/src/$line has no commit beyond upstream's: nothing to write (to drop every patch, empty patches/$line/series)"

scratch
export_patches "$tree" "$tmp/patches"
{
	# Comments stay at the top; the names below them are those of the tree.
	grep '^#' "$patches/series" || true
	(cd "$tmp/patches" && ls -1 -- *.patch)
} >"$tmp/patches/series"
for p in "$patches"/*.patch; do
	[ -e "$tmp/patches/$(basename "$p")" ] || rm -f "$p"
done
for p in "$tmp/patches"/*; do
	cmp -s "$p" "$patches/$(basename "$p")" || mv -f "$p" "$patches/"
done
matrix >"$tmp/README.md"
cmp -s "$tmp/README.md" "$root/patches/README.md" || mv -f "$tmp/README.md" "$root/patches/README.md"
mark_applied "$tree"
say "patches/$line holds $(series | wc -l) patches"
