#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/deps.sh [PACKAGE...]: installs the Debian or Ubuntu packages that building and testing need, or
# those named, as far as they are missing. Does nothing when none is.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

# has PACKAGE: whether what we need of it is there, however it came.
has() {
	case $1 in
	libseccomp-dev) command -v pkg-config >/dev/null && pkg-config --exists libseccomp ;;
	ca-certificates) [ -s /etc/ssl/certs/ca-certificates.crt ] || [ -s /etc/pki/tls/certs/ca-bundle.crt ] ;;
	libc6-dev) [ -e /usr/include/stdlib.h ] ;;
	iproute2) command -v ip >/dev/null ;;
	qemu-user) command -v qemu-aarch64 >/dev/null ;;
	*) command -v "$1" >/dev/null ;;
	esac
}

[ $# -gt 0 ] || set -- git gcc libc6-dev make pkg-config libseccomp-dev iptables iproute2 shellcheck ca-certificates
missing=()
for p; do
	PATH=$PATH:/usr/sbin:/sbin has "$p" || missing+=("$p")
done
[ ${#missing[@]} -gt 0 ] || exit 0

command -v apt-get >/dev/null || die "these are missing and there is no apt-get to install them: ${missing[*]}"
[ "$(id -u)" = 0 ] || die "these packages are missing: run as root: apt-get install ${missing[*]}"
say "installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 ||
	die "cannot install ${missing[*]}: $(grep -m 1 '^E:' "$log" || tail -n 1 "$log")"
for p in "${missing[@]}"; do
	has "$p" || die "$p is installed but what it brings is not found: install it by hand"
done
