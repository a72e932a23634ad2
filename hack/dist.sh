#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/dist.sh LINE: all that a release of the line has, in _output/dist/LINE: for each architecture
# tarball, deb, rpm, licences and bills of materials; the patched sources with vendor/; the patches;
# provenance.json (unsigned) and SHA256SUMS.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_line "${1-}"
need git
full=${version#v}+cnireload.$release dist=$out/dist/$line commit=$(library_commit)
case $commit in *-dirty | unknown) say "commit $commit: this is not for a release" ;; esac
"$root/hack/tools.sh" dev release >/dev/null
scratch
mkdir -p "$tmp/dist"

for arch in amd64 arm64; do
	files=$(GOARCH=$arch "$root/hack/package.sh" "$line")
	# shellcheck disable=SC2086 # names of packages hold no blanks
	cp $files "$tmp/dist/"
	bin=$out/$line/linux-$arch/bin
	(cd "$out/$line" && sha256sum "linux-$arch"/bin/*) | diff <(grep "linux-$arch/" "$patches/CHECKSUMS" || true) - >/dev/null ||
		say "the binaries for $arch are not those of patches/$line/CHECKSUMS: hack/checksums.sh --write $line makes it anew"
	hackgo release licenses -main "$tree" -own "$root" "$bin"/* | gzip -9n >"$tmp/dist/containerd-$full-linux-$arch.licenses.txt.gz"
	for b in "$bin"/*; do
		"$out/tools/bin/cyclonedx-gomod" bin -json -noserial -notimestamp -version "v$full" -output "$tmp/sbom" "$b" 2>"$tmp/log" ||
			die "cyclonedx-gomod: $(tail -n 1 "$tmp/log")"
		# shellcheck disable=SC2046 # nor do those of patches
		hackgo release sbom -base "$module@$version" $(series | sed "s,^,$patches/,") <"$tmp/sbom" \
			>"$tmp/dist/$(basename "$b")-$full-linux-$arch.cdx.json"
	done
done

epoch=$(package_epoch)
# pack NAME: a tarball of the folder $tmp/NAME, the same bytes every time.
pack() {
	find "$tmp/$1" -exec touch -h -d "@$epoch" {} +
	tar -C "$tmp" --sort=name --format=gnu --owner=0 --group=0 --numeric-owner --mode=go=rX,u+rw -cf - "$1" |
		gzip -9n >"$tmp/dist/$1.tar.gz"
}

say "the sources of $line with vendor/"
src=containerd-$full.src
mkdir "$tmp/$src"
tgit "$tree" archive HEAD | tar -C "$tmp/$src" -xf -
mkdir "$tmp/$src/cnireload-module"
(cd "$root" && find go.mod go.sum LICENSE NOTICE cnireload cri groupcommit internal status -type f ! -name '*_test.go' ! -path '*/testdata/*' -print0) |
	tar -C "$root" --null -T - -cf - | tar -C "$tmp/$src/cnireload-module" -xf -
(cd "$tmp/$src" && go mod edit -replace=github.com/cnireload/cnireload=./cnireload-module && go mod vendor) 2>"$tmp/log" ||
	go_failed "vendor/ of $line" "$tmp/log"
cat >"$tmp/$src/BUILD-cnireload.md" <<-END
	containerd $version with the patches of cnireload at commit $commit. It builds without a network, with Go $base_go:

	    export CGO_ENABLED=0 GOFLAGS=-mod=vendor GOTOOLCHAIN=local GOPROXY=off
	    go build -trimpath -buildvcs=false -tags=$tags -ldflags="$(ldflags "$version+cnireload.$release" "$revision+cnireload.$commit")" -o bin/ ./cmd/containerd ./cmd/ctr
	    go build -trimpath -buildvcs=false -tags=$tags,no_grpc -ldflags="$(ldflags "$version+cnireload.$release" "$revision+cnireload.$commit")" -o bin/ ./cmd/containerd-shim-runc-v2
END
pack "$src"

patched=containerd-$full.patches
mkdir "$tmp/$patched"
cp "$patches"/* "$tmp/$patched/"
cat >"$tmp/$patched/README.md" <<-END
	Patches for containerd $version, in the order of the file series. Here is where this archive was unpacked; run the
	commands in containerd's sources.

	    git am Here/*.patch                                       # git, in a checkout of $version
	    QUILT_PATCHES=Here QUILT_SERIES=Here/series quilt push -a  # quilt
	    cp Here/*.patch Here/series debian/patches/                # Debian, where debian/patches is empty

	For rpm, list them and apply them with %autosetup -p1:

	$(series | sed 's/^\([0-9]*\)-.*/    Patch\1: &/')

	The patches use the Go module github.com/cnireload/cnireload of the same release. Its sources are in the folder
	cnireload-module of $src.tar.gz:

	    go mod edit -require=github.com/cnireload/cnireload@v0.0.0 -replace=github.com/cnireload/cnireload=./cnireload-module
	    go mod vendor                                             # where the sources have vendor/
END
pack "$patched"

head=$(tgit "$root" rev-parse HEAD 2>/dev/null || echo "$commit")
hackgo release provenance -line "$line" -base "$module@$version" -sum "$sum" -commit "$head" -go "$base_go" "$tmp/dist"/* >"$tmp/provenance.json"
mv "$tmp/provenance.json" "$tmp/dist/"
(cd "$tmp/dist" && sha256sum -- * >"$tmp/SHA256SUMS")
mv "$tmp/SHA256SUMS" "$tmp/dist/"
rm -rf "$dist"
mv "$tmp/dist" "$dist"
ls -1 "$dist"
