#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/debs.sh: downloads the Debian or Ubuntu packages that critest's images are made of and unpacks
# them, one folder a package set, into _output/critest/debs. Nothing is installed. apt-get checks what
# it downloads against the distribution's signed lists; a later run checks the unpacked files against
# the sums noted then and downloads nothing.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need apt-get dpkg-deb
lock debs
to=$out/critest/debs
# The architecture is part of it: the images hold its programs.
key=$(cat "$0" <(dpkg --print-architecture) | sha256sum | cut -d ' ' -f 1)

whole() { [ "$(cat "$to/.key" 2>/dev/null)" = "$key" ] && (cd "$to" && sha256sum --quiet -c .sums) >/dev/null 2>&1; }

# fetch PACKAGE...: into the current folder.
fetch() {
	local try
	for try in 1 2; do
		apt-get -q -o APT::Sandbox::User=root download "$@" >"$tmp/log" 2>&1 && return
		# A new machine has no lists, an old one has lists of versions that are gone.
		[ "$try" = 2 ] || apt-get -q update >"$tmp/log" 2>&1 || break
	done
	die "cannot download $* from the distribution's mirror (is the network there, do apt's sources work? critest's images are made of these packages): $(grep -m 1 '^E:' "$tmp/log" || tail -n 1 "$tmp/log")"
}

# libraries DEB...: the packages with libraries that these depend on.
libraries() {
	local deb
	for deb; do dpkg-deb -f "$deb" Depends; done | tr ',' '\n' | sed -E 's/^ *//; s/[ |:].*//' | grep -E '^(lib|zlib)' | sort -u
}

# unpack SET PACKAGE...: the packages, and the libraries that they need, as one tree.
unpack() {
	local set=$1 before='' p deb absent
	shift
	mkdir -p "$tmp/deb-$set" "$tmp/debs/$set"
	cd "$tmp/deb-$set"
	while [ "$*" != "$before" ]; do
		absent=()
		for p; do compgen -G "${p}_*.deb" >/dev/null || absent+=("$p"); done
		[ ${#absent[@]} = 0 ] || fetch "${absent[@]}"
		before=$*
		# shellcheck disable=SC2046 # names of packages hold no blanks
		set -- $(printf '%s\n' "$@" $(libraries ./*.deb) | sort -u)
	done
	for deb in ./*.deb; do
		dpkg-deb -x "$deb" "$tmp/debs/$set"
		echo "$set $(dpkg-deb -f "$deb" Package) $(dpkg-deb -f "$deb" Version) $(sha256sum <"$deb" | cut -d ' ' -f 1)" >>"$tmp/debs/packages"
	done
}

if ! whole; then
	say "downloading the packages for critest's images"
	scratch
	mkdir "$tmp/debs"
	unpack busybox busybox-static
	unpack nginx nginx
	cd "$tmp/debs"
	find . -type f ! -name '.*' -print0 | sort -z | xargs -0 sha256sum >"$tmp/sums"
	mv "$tmp/sums" .sums
	echo "$key" >.key
	mkdir -p "$out/critest"
	rm -rf "$to"
	mv "$tmp/debs" "$to"
fi
echo "$to"
