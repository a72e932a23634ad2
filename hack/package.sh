#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/package.sh LINE: a tarball (with its .sha256sum), a deb and an rpm of the patched line in _output/dist.
# The same commit makes the same bytes.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"
dist=$out/dist
GOARCH=$(go env GOARCH)
export GOARCH
[ "$(go env GOVERSION)" = "go$base_go" ] || die "this is $(go env GOVERSION), packages are made with go$base_go: unset GOTOOLCHAIN=local"
"$root/hack/build.sh" "$line" >/dev/null
"$root/hack/tools.sh" dev >/dev/null
if [ -d "$tree" ] && edited "$tree"; then
	die "_output/src/$line holds edits that patches/$line does not: run hack/refresh.sh $line first"
fi
lock "dist-$line"
scratch

SOURCE_DATE_EPOCH=$(package_epoch)
export SOURCE_DATE_EPOCH
PKG_VERSION=${version#v}+cnireload.$release PKG_ARCH=$GOARCH
export PKG_VERSION PKG_ARCH
stage=$tmp/stage

mkdir -p "$stage"/{bin,man} "$stage"/doc/{patches,examples} "$tmp/dist"
cp "$out/$line/linux-$GOARCH/bin"/{containerd,containerd-shim-runc-v2,ctr} "$stage/bin/"
cp "$root"/hack/package/{containerd.service,config.toml,lintian-overrides,postinst.sh,prerm.sh,rpm-post.sh,rpm-preun.sh,rpm-postun.sh} "$stage/"
sed "s/@CONFIG_SUM@/$(tail -n +2 "$root/hack/package/config.toml" | sha256sum | cut -d ' ' -f 1)/" \
	"$root/hack/package/postrm.sh" >"$stage/postrm.sh"
gzip -9n <"$root/hack/package/containerd-cnireload.7" >"$stage/man/containerd-cnireload.7.gz"
cp -R "$root/README.md" "$root"/docs/*.md "$root/docs/fleet" "$stage/doc/"
cp "$root/hack/package/pin" "$stage/doc/examples/"
cp "$tree/LICENSE" "$stage/doc/LICENSE"
cat "$root/NOTICE" <(printf -- '\n--- NOTICE of containerd ---\n\n') "$tree/NOTICE" >"$stage/doc/NOTICE"
cp "$patches"/{BASE,series} "$stage/doc/patches/"
for p in $(series); do cp "$patches/$p" "$stage/doc/patches/"; done
cat >"$stage/doc/copyright" <<-END
	Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
	Upstream-Name: containerd
	Source: https://github.com/containerd/containerd
	Comment: Built from the Go module $module $version with the patches in
	 /usr/share/doc/containerd/patches and the Go module github.com/cnireload/cnireload at
	 commit $(library_commit).

	Files: *
	Copyright: 2015-2026 The containerd Authors
	 2026 The cnireload Authors
	License: Apache-2.0
	 The full text is in /usr/share/doc/containerd/LICENSE, and on Debian in
	 /usr/share/common-licenses/Apache-2.0.
END
printf 'containerd (%s-1) unstable; urgency=medium\n\n  * %s with the patches in /usr/share/doc/containerd/patches.\n\n -- The cnireload Authors <maintainers@cnireload.invalid>  %s\n' \
	"$PKG_VERSION" "$version" "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9n >"$stage/doc/changelog.Debian.gz"
find "$stage" -type d -exec chmod 0755 {} +
find "$stage" -type f -exec chmod 0644 {} +
chmod 0755 "$stage"/bin/* "$stage"/*.sh
find "$stage" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

tarball=containerd-$PKG_VERSION-linux-$GOARCH.tar.gz
tar -C "$stage" --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -cf - bin |
	gzip -9n >"$tmp/dist/$tarball"
(cd "$tmp/dist" && sha256sum "$tarball" >"$tarball.sha256sum")
for packager in deb rpm; do
	(cd "$stage" && "$out/tools/bin/nfpm" package --config "$root/hack/package/nfpm.yaml" --packager $packager --target "$tmp/dist/") >"$tmp/nfpm.log" 2>&1 ||
		die "nfpm: $(tail -n 1 "$tmp/nfpm.log")"
done

mkdir -p "$dist"
mapfile -t made < <(cd "$tmp/dist" && ls)
mv -f "$tmp/dist"/* "$dist/"
printf '%s\n' "${made[@]/#/$dist/}"
