#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/new-line.sh LINE VERSION [FROM]: makes patches/LINE for that version of upstream out of the
# patches of FROM (default: the newest line). The numbers stay the same. Where a patch conflicts,
# hack/bump.sh says how to go on.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
new=${1-} to=${2-}
case $new in v[0-9]*.[0-9]*) ;; *) die "name a line such as v2.3, not \"$new\"" ;; esac
case $to in "$new".*) ;; *) die "name a version of $new, not \"$to\"" ;; esac
[ ! -e "$root/patches/$new" ] || die "patches/$new exists: hack/bump.sh $new $to moves it"
use_line "${3:-$(all_lines | tail -n 1)}"

scratch
cp -R "$patches" "$tmp/line"
# Each patch says for which lines it is.
for p in "$patches"/*.patch "$tmp/line"/*.patch; do
	lines=$(printf '%s\n' "$new" "$(sed -n 's/^Applies-To: //p' "$p" | tr -d ' ' | tr , '\n')" | sort -uV | paste -sd , | sed 's/,/, /g')
	sed -i "s/^Applies-To: .*/Applies-To: $lines/" "$p"
done
mv "$tmp/line" "$root/patches/$new"
"$root/hack/bump.sh" "$new" "$to"
