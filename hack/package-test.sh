#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/package-test.sh LINE: makes the packages, looks into them, installs the deb in a throw-away
# root, and makes them again from a copy of the checkout elsewhere: the bytes must be the same.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"
need dpkg dpkg-deb apt-get
[ "$(id -u)" = 0 ] || die "needs root for chroot: run it with sudo"
scratch
made=$tmp/dist chroot=$tmp/root
mapfile -t files < <("$root/hack/package.sh" "$line")
mkdir -p "$made"
cp "${files[@]}" "$made/"
arch=$(go env GOARCH) full=${version#v}+cnireload.$release
commit=$(library_commit)
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
check "Depends" same runc "$(field Depends)"
check "Recommends" same "" "$(field Recommends)"

# A root with what maintainer scripts call, and a runc that dpkg takes for installed. No systemd runs in it:
# stand-ins note what it is asked to do. That it does it, they do not show.
mkdir -p "$chroot"/{bin,dev,etc,usr/bin,run/systemd/system,var/lib/dpkg/{info,updates,triggers}}
touch "$chroot"/dev/null "$chroot"/var/lib/dpkg/available
printf 'Package: runc\nStatus: install ok installed\nMaintainer: nobody\nArchitecture: %s\nVersion: 1.1.5\nDescription: stand-in\n\n' \
	"$(dpkg --print-architecture)" >"$chroot/var/lib/dpkg/status"
for prog in sh cp mkdir grep head tail sha256sum rm rmdir; do
	path=$(readlink -f "$(command -v $prog)")
	cp "$path" "$chroot/bin/$prog"
	for lib in $(ldd "$path" | grep -o '/[^ ]*'); do
		mkdir -p "$chroot$(dirname "$lib")"
		cp -L "$lib" "$chroot$lib"
	done
done
for prog in deb-systemd-helper deb-systemd-invoke systemctl; do
	printf '#!/bin/sh\necho "%s $*" >>/asked\n[ "$*" != "--quiet was-enabled containerd.service" ] || [ ! -e /disabled ]\n' $prog >"$chroot/usr/bin/$prog"
	chmod 0755 "$chroot/usr/bin/$prog"
done
config=$chroot/etc/containerd/config.toml
install_deb() { rm -f "$chroot/asked" && dpkg --root="$chroot" --log=/dev/null -i "$deb" </dev/null 2>&1; }
remove_deb() { rm -f "$chroot/asked" && dpkg --root="$chroot" --log=/dev/null "--$1" containerd </dev/null 2>&1; }
asked() { same "$1" "$(grep -v daemon-reload "$chroot/asked" | paste -sd ';')"; }
helper='deb-systemd-helper unmask containerd.service;deb-systemd-helper --quiet was-enabled containerd.service;deb-systemd-helper'

check "a fresh install" install_deb
check "a fresh install enables and starts" asked "$helper enable containerd.service;deb-systemd-invoke start containerd.service"
check "a fresh install finds the distribution's plugins" grep -qF "bin_dirs = ['/opt/cni/bin', '/usr/lib/cni', '/usr/libexec/cni']" <(chroot "$chroot" /usr/bin/containerd config dump 2>&1 || true)
check "install again over it" install_deb
check "an upgrade restarts what runs" asked "$helper enable containerd.service;deb-systemd-invoke try-restart containerd.service"
touch "$chroot/disabled"
check "install again where it is disabled" install_deb
check "it stays disabled" asked "$helper update-state containerd.service;deb-systemd-invoke try-restart containerd.service"
rm "$chroot/disabled"
check "remove" remove_deb remove
check "a removal stops it" asked "deb-systemd-invoke stop containerd.service"
check "the configuration is there after a removal" test -e "$config"
check "purge" remove_deb purge
check "an unchanged configuration goes" test ! -e "$chroot/etc/containerd"
mkdir "$chroot/etc/containerd"
echo 'disabled_plugins = ["cri"]' >"$config"
said=$(install_deb || true)
check "a configuration that disables CRI is told" grep -q 'disabled_plugins in /etc/containerd/config.toml names cri' <<<"$said"
check "a configuration that is there stays" same 'disabled_plugins = ["cri"]' "$(cat "$config")"
check "purge again" remove_deb purge
check "a changed configuration stays" same 'disabled_plugins = ["cri"]' "$(cat "$config")"
rm -r "$chroot/etc/containerd" "$chroot/run/systemd"
check "install in a chroot" install_deb
check "nothing is started in a chroot" asked "$helper enable containerd.service"

check "containerd --version" same "containerd github.com/cnireload/cnireload $version+cnireload.$release $revision+cnireload.$commit" \
	"$(chroot "$chroot" /usr/bin/containerd --version || true)"
check "ctr --version" same "ctr github.com/cnireload/cnireload $version+cnireload.$release" "$(chroot "$chroot" /usr/bin/ctr --version || true)"
check "CRI in the default configuration" grep -q "io.containerd.cri.v1.runtime" <(chroot "$chroot" /usr/bin/containerd config default)
check "unit" grep -qx 'ExecStart=/usr/bin/containerd' "$chroot/usr/lib/systemd/system/containerd.service"
for f in copyright LICENSE NOTICE changelog.Debian.gz README.md configuration.md fleet/alerts.yaml examples/pin patches/BASE patches/series $(series | sed 's,^,patches/,'); do
	check "doc/$f" test -s "$chroot/usr/share/doc/containerd/$f"
done
check "same binary in deb and tarball" same "$(tar -xzOf "$made/$tarball" bin/containerd | sha256sum)" "$(sha256sum <"$chroot/usr/bin/containerd")"
check "man page" grep -q containerd-cnireload <(zcat "$chroot/usr/share/man/man7/containerd-cnireload.7.gz")
check "purge in a chroot" remove_deb purge
check "nothing left" same "" "$(find "$chroot"/{usr/share,usr/lib/systemd,etc/containerd} "$chroot"/usr/bin/{containerd,ctr} -type f 2>/dev/null || true)"

# apt with a repository that has a newer containerd without the patches, with and without the pin.
apt=$tmp/apt
mkdir -p "$apt"/{etc/preferences.d,lists/partial,cache/archives/partial,repo}
about() { printf '%s\n' "Package: containerd" "Maintainer: nobody" "Architecture: $(dpkg --print-architecture)" "Version: $1" "Description: stand-in" "${@:2}"; }
about "$full-1" "Status: install ok installed" >"$apt/status"
about 2.999.0-1 "Filename: ./containerd.deb" "Size: 1" "SHA256: $(printf %064d 0)" >"$apt/repo/Packages"
echo "deb [trusted=yes] file:$apt/repo ./" >"$apt/etc/sources.list"
apt_get() {
	apt-get -o Dir::Etc="$apt/etc" -o Dir::State::lists="$apt/lists" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" \
		-o Debug::NoLocking=1 -o APT::Sandbox::User=root -o Acquire::Languages=none "$@" 2>&1
}
check "apt knows a newer containerd" apt_get update
check "apt takes it without the pin" grep -q "^Inst containerd \[$full-1\] (2.999.0-1" <(apt_get -s upgrade)
cp "$root/hack/package/pin" "$apt/etc/preferences.d/containerd"
check "apt runs with the pin" apt_get -s upgrade
check "apt leaves it with the pin" same "" "$(apt_get -s upgrade | grep '^Inst')"

# Elsewhere, with the tools that are there already.
mkdir -p "$tmp/elsewhere/_output"
tar -C "$root" --exclude=./_output --exclude=./.git --exclude=./vendor -cf - . | tar -C "$tmp/elsewhere" -xf -
cp -al "$root/_output/tools" "$tmp/elsewhere/_output/"
check "make the packages elsewhere" env CNIRELOAD_COMMIT="$commit" "$tmp/elsewhere/hack/package.sh" "$line"
for f in "${files[@]}"; do
	check "same bytes elsewhere: $(basename "$f")" cmp "$made/$(basename "$f")" "$tmp/elsewhere/_output/dist/$(basename "$f")"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
