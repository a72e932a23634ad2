#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/build.sh [--stock] [--race] LINE: containerd, containerd-shim-runc-v2 and ctr of the line, patched,
# in _output/LINE/linux-ARCH/bin; with --stock unpatched, in _output/stock/LINE/linux-ARCH/bin. With
# --race the daemon, and it alone, is built with the race detector, in _output/race/LINE/linux-ARCH/bin
# or _output/race-stock/LINE/linux-ARCH/bin, beside the other programs of the build without.
# The same sources and Go version make the same bytes, wherever the checkout is.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
stock='' race='' cmds=(containerd containerd-shim-runc-v2 ctr)
while :; do
	case ${1-} in
	--stock) stock=stock/ ;;
	--race) race=-race cmds=(containerd) ;;
	*) break ;;
	esac
	shift
done
use_line "${1-}"

export CGO_ENABLED=0 GOOS=linux
GOARCH=$(go env GOARCH)
export GOARCH
bin=$out/$stock$line/linux-$GOARCH/bin
if [ -n "$race" ]; then
	# Its runtime is C.
	need gcc
	"$root/hack/build.sh" ${stock:+--stock} "$line" >/dev/null
	plain=$bin bin=$out/race${stock:+-stock}/$line/linux-$GOARCH/bin
	export CGO_ENABLED=1
fi

if [ -n "$stock" ]; then
	"$root/hack/fetch.sh" "$line"
	src=$out/src/stock/$line package=$module shown=$version
else
	[ -f "$root/go.mod" ] || die "no go.mod in $root: the library is missing from this checkout"
	"$root/hack/apply.sh" "$line"
	src=$tree package=github.com/cnireload/cnireload shown=$version+cnireload.$release
	revision+=+cnireload.$(library_commit)
fi
lock "build-${stock//\//-}${race:+race-}$line"
scratch
cd "$src"

[ "$(go env GOVERSION)" = "go$base_go" ] || say "$(go env GOVERSION) builds this, a release needs go$base_go: unset GOTOOLCHAIN=local"
say "building ${stock:+stock }$line for linux/$GOARCH${race:+ with the race detector} (some minutes when nothing is cached)"
packages=$(go list -deps -mod=readonly $race -tags=$tags "${cmds[@]/#/./cmd/}" 2>"$tmp/err" | wc -l) ||
	go_failed "${stock:+stock }$line" "$tmp/err"
for cmd in "${cmds[@]}"; do
	extra=''
	[ "$cmd" != containerd-shim-runc-v2 ] || extra=,no_grpc
	go build -v $race -mod=readonly -trimpath -buildvcs=false -tags="$tags$extra" -ldflags="$(ldflags "$shown" "$revision" "$package")" \
		-o "$tmp/bin/$cmd" "./cmd/$cmd" 2>&1 | progress "$packages" || die "$cmd of ${stock:+stock }$line does not build: see above"
done
[ -z "$race" ] || cp "$plain"/{containerd-shim-runc-v2,ctr} "$tmp/bin/"

if [ "$GOARCH" = "$(go env GOHOSTARCH)" ]; then
	want="containerd $package $shown $revision"
	got=$("$tmp/bin/containerd" --version)
	[ "$got" = "$want" ] || die "containerd --version prints \"$got\" instead of \"$want\""
	# Not piped to "grep -q": that may end first, and the write error would count as a failure.
	[[ $("$tmp/bin/containerd-shim-runc-v2" -v) = *" $shown"* ]] || die "containerd-shim-runc-v2 -v does not name $shown"
	[[ $("$tmp/bin/ctr" --version) = *" $shown"* ]] || die "ctr --version does not name $shown"
fi

mkdir -p "$bin"
for cmd in containerd containerd-shim-runc-v2 ctr; do
	# A daemon that runs keeps its file; one that is the same keeps its time.
	cmp -s "$tmp/bin/$cmd" "$bin/$cmd" || mv -f "$tmp/bin/$cmd" "$bin/$cmd"
done
echo "$bin"
