#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/tools.sh [GROUP...]: builds the programs that hack/tools/go.mod pins. Groups: node (runc, CNI
# plugins and crictl, in _output/tools/{bin,cni}), test (critest, crane, registry), dev (staticcheck,
# nfpm, actionlint), release (cyclonedx-gomod), kubelet (pinned by hack/kubelet/go.mod). Default: node and test. A
# group that is up to date is skipped.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
# They run on this machine, also when GOARCH names another one to build for.
unset GOOS GOARCH
bin=$out/tools/bin cni=$out/tools/cni
need_go "$(sed -n 's/^go //p' "$root/hack/tools/go.mod")"
lock tools

# version MODULE: the version that go.mod pins, without its v.
version() { go -C "$mod" list -m -f '{{slice .Version 1}}' "$1"; }

# The functions below run where "set -e" does not work, hence "|| return".

# build DIR PACKAGE...: main packages, without cgo, into DIR.
build() {
	local to=$1
	shift
	CGO_ENABLED=0 go -C "$mod" build -v -trimpath -ldflags="-s -w -buildid= ${ldflags-}" -o "$to/" "$@" 2>&1 | progress "$packages"
}

# count PACKAGE...: how many packages there are to compile at most; downloads them.
count() {
	packages=$(go -C "$mod" list -deps "$@" 2>"$tmp/err" | wc -l) || go_failed "the $group tools" "$tmp/err"
}

make_node() {
	need gcc pkg-config
	pkg-config --exists libseccomp || die "libseccomp's headers are not installed: run hack/deps.sh as root"
	local p list=()
	for p in main/{bridge,ptp,loopback,macvlan,ipvlan,vlan,host-device,dummy} meta/{portmap,bandwidth,tuning,firewall} ipam/{host-local,dhcp,static}; do
		list+=("github.com/containernetworking/plugins/plugins/$p")
	done
	count "${list[@]}" sigs.k8s.io/cri-tools/cmd/crictl github.com/opencontainers/runc
	ldflags="-X github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion=v$(version github.com/containernetworking/plugins)" \
		build "$tmp/cni" "${list[@]}" || return
	ldflags="-X sigs.k8s.io/cri-tools/pkg/version.Version=$(version sigs.k8s.io/cri-tools)" \
		build "$tmp/bin" sigs.k8s.io/cri-tools/cmd/crictl || return
	CGO_ENABLED=1 go -C "$mod" build -v -trimpath -tags=seccomp,urfave_cli_no_docs -ldflags='-s -w -buildid=' \
		-o "$tmp/bin/" github.com/opencontainers/runc 2>&1 | progress "$packages"
}

make_test() {
	count github.com/google/go-containerregistry/cmd/{crane,registry}
	count -test sigs.k8s.io/cri-tools/cmd/critest
	build "$tmp/bin" github.com/google/go-containerregistry/cmd/{crane,registry} || return
	CGO_ENABLED=0 go -C "$mod" test -c -v -trimpath -ldflags="-s -w -X sigs.k8s.io/cri-tools/pkg/version.Version=$(version sigs.k8s.io/cri-tools)" \
		-o "$tmp/bin/critest" sigs.k8s.io/cri-tools/cmd/critest 2>&1 | progress "$packages"
}

make_dev() {
	local list=(honnef.co/go/tools/cmd/staticcheck github.com/goreleaser/nfpm/v2/cmd/nfpm github.com/rhysd/actionlint/cmd/actionlint)
	count "${list[@]}"
	build "$tmp/bin" "${list[@]}"
}

make_release() {
	count github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod
	build "$tmp/bin" github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod
}

# Kubelet has a module of its own: what it requires must not move the other programs' versions.
make_kubelet() {
	count k8s.io/kubernetes/cmd/kubelet
	# With cgo, as Kubernetes releases it.
	need gcc
	CGO_ENABLED=1 go -C "$mod" build -v -trimpath -ldflags="-s -w -X k8s.io/component-base/version.gitVersion=v$(version k8s.io/kubernetes)" \
		-o "$tmp/bin/" k8s.io/kubernetes/cmd/kubelet 2>&1 | progress "$packages"
}

[ $# -gt 0 ] || set -- node test
for group; do
	mod=$root/hack/tools
	case $group in
	node) want=(bin/{runc,crictl} cni/{bridge,ptp,host-local,loopback,portmap,bandwidth,tuning,firewall}) ;;
	test) want=(bin/{critest,crane,registry}) ;;
	dev) want=(bin/{staticcheck,nfpm,actionlint}) ;;
	release) want=(bin/cyclonedx-gomod) ;;
	kubelet) want=(bin/kubelet) mod=$root/hack/kubelet ;;
	*) die "no group of tools \"$group\": there are node, test, dev, release and kubelet" ;;
	esac
	stamp=$(cat "$mod/go.mod" "$mod/go.sum" "$0" <(go version) | sha256sum)
	# Up to date is what was built from the same pins and is still all there.
	whole=1
	for f in "${want[@]}"; do [ -x "$out/tools/$f" ] && [ -s "$out/tools/$f" ] || whole=''; done
	[ -n "$whole" ] && [ "$(cat "$out/tools/.stamp-$group" 2>/dev/null)" = "$stamp" ] && continue

	say "building the $group tools"
	scratch
	mkdir -p "$tmp/bin" "$tmp/cni" "$bin" "$cni"
	"make_$group" || die "the $group tools do not build: see above"
	for f in "$tmp"/bin/*; do [ ! -e "$f" ] || mv -f "$f" "$bin/"; done
	for f in "$tmp"/cni/*; do [ ! -e "$f" ] || mv -f "$f" "$cni/"; done
	echo "$stamp" >"$out/tools/.stamp-$group"
	rm -rf "$tmp"
done
echo "$out/tools"
