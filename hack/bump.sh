#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/bump.sh LINE VERSION: moves the line's patches to another version of upstream, with a
# three-way merge, and writes BASE and patches/LINE anew. Where a patch conflicts it stops, says how
# to go on, and "hack/bump.sh --continue LINE" does the rest.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
go_on=''
[ "${1-}" != --continue ] || { go_on=1 && shift; }
use_line "${1-}"
need git
lock "src-$line"

if [ -z "$go_on" ]; then
	new=${2-}
	[ -n "$new" ] || die "which version of $module? This line is at $version"
	[ ! -d "$tree" ] || ! edited "$tree" ||
		die "_output/src/$line holds edits of yours: hack/refresh.sh $line writes them to patches/$line, rm -r _output/src/$line throws them away"
	scratch
	pin "$new" >"$tmp/BASE"
	say "merging patches/$line from $version to $new"
	apply_to "$tmp/tree" loose
	# The new sources are a second root; the patches are commits that move from one to the other.
	to=$(commit_upstream "$tmp/tree" "$tmp/BASE" "$tmp/new")
	tgit "$tmp/tree" update-ref refs/cnireload/old refs/cnireload/base
	tgit "$tmp/tree" update-ref refs/cnireload/base "$to"
	cp "$tmp/BASE" "$tmp/tree/.git/cnireload-BASE"
	rm -rf "$tree"
	mv "$tmp/tree" "$tree"
	tgit "$tree" rebase --onto refs/cnireload/base refs/cnireload/old >"$tree/.git/rebase.log" 2>&1 || true
fi

[ -f "$tree/.git/cnireload-BASE" ] || die "no move of $line is under way: hack/bump.sh $line VERSION begins one"
if [ -d "$tree/.git/rebase-merge" ] || [ -d "$tree/.git/rebase-apply" ]; then
	die "these files conflict: $(tgit "$tree" diff --name-only --diff-filter=U | paste -sd ' ')
  cd $tree, edit them, git add them, git rebase --continue, until the rebase has ended; then hack/bump.sh --continue $line"
fi
mv "$tree/.git/cnireload-BASE" "$patches/BASE"
rm -f "$patches/CHECKSUMS"
flock -u 9
"$root/hack/refresh.sh" "$line"
say "patches/$line is at $(base VERSION): next are hack/verify.sh $line, hack/build.sh $line and make test LINE=$line"
