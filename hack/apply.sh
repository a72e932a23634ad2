#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/apply.sh [--force] [--loose] LINE: upstream's sources with the line's patches as commits in
# _output/src/LINE. Does nothing when they are there already. Never overwrites commits or edits of
# yours without --force. --loose lets patches apply with an offset, to move them to a new base.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
force='' loose=''
while :; do
	case ${1-} in
	--force) force=1 ;;
	--loose) loose=1 ;;
	*) break ;;
	esac
	shift
done
use_line "${1-}"
need git
lock "src-$line"

key=$(inputs_hash)
if [ -d "$tree" ] && [ -z "$force" ]; then
	if ! edited "$tree"; then
		[ "$(applied_key "$tree")" = "$key" ] && exit 0
	elif [ "$(applied_key "$tree")" = "$key" ]; then
		say "_output/src/$line holds edits of yours: using it as it is (hack/refresh.sh $line writes them to patches/$line)"
		exit 0
	else
		die "_output/src/$line holds edits of yours and patches/$line has changed: hack/refresh.sh $line writes yours back over it, hack/apply.sh --force $line throws yours away"
	fi
fi

scratch
say "applying patches/$line to $module $version"
apply_to "$tmp/tree" "$loose"
# The old tree goes only now that the new one is whole.
rm -rf "$tree"
mv "$tmp/tree" "$tree"
