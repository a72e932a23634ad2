#!/usr/bin/env bash
# Copyright The cnireload Authors.
# SPDX-License-Identifier: Apache-2.0
#
# hack/arm64.sh: the library's unit tests, compiled for linux/arm64 and run under qemu's user mode.
# The plugins that they run are shell scripts, run by this machine's shell.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_go "$(sed -n 's/^go //p' "$root/go.mod")"
"$root/hack/deps.sh" qemu-user
cd "$root"
# One package and few tests at a time: each emulated process costs many times a real one.
GOARCH=arm64 CGO_ENABLED=0 exec go test -p 1 -short -parallel 2 -timeout=40m -exec qemu-aarch64 ./...
