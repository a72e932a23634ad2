#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/package-test.sh LINE: makes the packages, looks into them, installs the deb in a throw-away
# root, and makes them again from a copy of the checkout elsewhere: the bytes must be the same.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"
need dpkg dpkg-deb
[ "$(id -u)" = 0 ] || die "needs root for chroot: run it with sudo"
scratch
made=$tmp/dist chroot=$tmp/root
mapfile -t files < <("$root/hack/package.sh" "$line")
mkdir -p "$made"
cp "${files[@]}" "$made/"
arch=$(go env GOARCH) full=${version#v}+cnireload.$release
deb=$made/containerd_$full-1_$arch.deb
tarball=containerd-$full-linux-$arch.tar.gz

passed=0 failed=0
# check WHAT COMMAND...: one test.
check() {
	local what=$1
	shift
	if "$@" >"$tmp/log" 2>&1; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		echo "FAIL $what" && sed 's/^/    /' "$tmp/log"
	fi
}
# same WANT GOT
same() { [ "$1" = "$2" ] || { printf 'want: %s\ngot:  %s\n' "$1" "$2" && return 1; }; }
field() { dpkg-deb -f "$deb" "$1"; }

check "sha256sum of the tarball" env -C "$made" sha256sum -c "$tarball.sha256sum"
check "only bin/ in the tarball" same "$(printf 'bin/\nbin/containerd\nbin/containerd-shim-runc-v2\nbin/ctr')" "$(tar -tzf "$made/$tarball")"
check "owners in the tarball" same "0/0" "$(tar --numeric-owner -tvzf "$made/$tarball" | awk '{print $2}' | sort -u)"
check "Package" same containerd "$(field Package)"
check "Version" same "$full-1" "$(field Version)"
check "Architecture" same "$(dpkg --print-architecture)" "$(field Architecture)"
check "Conflicts" same containerd.io "$(field Conflicts)"
check "Replaces" same containerd.io "$(field Replaces)"
check "Provides" same "containerd-cnireload (= $full-1)" "$(field Provides)"
check "Recommends" same runc "$(field Recommends)"
check "no Depends" same "" "$(field Depends)"

# A root that holds a shell for the maintainer scripts and nothing else.
mkdir -p "$chroot"/{bin,var/lib/dpkg/{info,updates,triggers}}
touch "$chroot"/var/lib/dpkg/{status,available}
shell=$(readlink -f /bin/sh)
cp "$shell" "$chroot/bin/sh"
for lib in $(ldd "$shell" | grep -o '/[^ ]*'); do
	mkdir -p "$chroot$(dirname "$lib")"
	cp -L "$lib" "$chroot$lib"
done
install_deb() { dpkg --root="$chroot" --force-confnew --log=/dev/null -i "$deb"; }
remove_deb() { dpkg --root="$chroot" --log=/dev/null --purge containerd; }
check "install" install_deb
check "install again over it" install_deb
check "containerd --version" same "containerd github.com/cnireload/cnireload $version+cnireload.$release $revision" \
	"$(chroot "$chroot" /usr/bin/containerd --version || true)"
check "ctr --version" same "ctr github.com/cnireload/cnireload $version+cnireload.$release" "$(chroot "$chroot" /usr/bin/ctr --version || true)"
check "CRI in the default configuration" grep -q "io.containerd.cri.v1.runtime" <(chroot "$chroot" /usr/bin/containerd config default)
check "unit" grep -qx 'ExecStart=/usr/bin/containerd' "$chroot/usr/lib/systemd/system/containerd.service"
for f in copyright LICENSE NOTICE changelog.gz patches/BASE patches/series $(series | sed 's,^,patches/,'); do
	check "doc/$f" test -s "$chroot/usr/share/doc/containerd/$f"
done
check "same binary in deb and tarball" same "$(tar -xzOf "$made/$tarball" bin/containerd | sha256sum)" "$(sha256sum <"$chroot/usr/bin/containerd")"
check "purge" remove_deb
check "nothing left" same "" "$(find "$chroot/usr" -type f -not -path '*/lib*-linux-*' -not -name 'ld-*' 2>/dev/null || true)"

# Elsewhere, with the tools that are there already.
mkdir -p "$tmp/elsewhere/_output"
tar -C "$root" --exclude=./_output --exclude=./.git --exclude=./vendor -cf - . | tar -C "$tmp/elsewhere" -xf -
cp -al "$root/_output/tools" "$tmp/elsewhere/_output/"
check "make the packages elsewhere" "$tmp/elsewhere/hack/package.sh" "$line"
for f in "${files[@]}"; do
	check "same bytes elsewhere: $(basename "$f")" cmp "$made/$(basename "$f")" "$tmp/elsewhere/_output/dist/$(basename "$f")"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
