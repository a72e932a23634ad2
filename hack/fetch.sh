#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/fetch.sh LINE [DIR]: the pinned upstream sources, hash checked, writable, in DIR
# (default: _output/src/stock/LINE, kept when it is there already).
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"

dir=${2-}
if [ -z "$dir" ]; then
	dir=$out/src/stock/$line
	lock "stock-$line"
	[ "$(cat "$dir/.cnireload-sum" 2>/dev/null)" = "$sum" ] && exit 0
	say "laying out $module $version in _output/src/stock/$line"
else
	[ ! -e "$dir" ] || die "$dir exists already: name a folder that does not"
fi
scratch
hackgo source -module "$module" -version "$version" -sum "$sum" -dir "$tmp/tree"
mkdir -p "$(dirname "$dir")"
if [ -z "${2-}" ]; then
	echo "$sum" >"$tmp/tree/.cnireload-sum"
	rm -rf "$dir"
fi
mv "$tmp/tree" "$dir"
